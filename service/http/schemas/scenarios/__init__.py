"""Wire types of scenarios, and how a request narrows what a scenario has saved."""
