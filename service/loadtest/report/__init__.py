"""Reports of a load test: figures in words, tables on the terminal, and one HTML page."""
