"""Reports of a load test: tables, sentences and warnings, on the terminal and as an HTML page."""
