"""Wire types: what comes in, how it becomes values of the domain, and what goes out."""
