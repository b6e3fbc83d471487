"""Entry point of `python -m service.cli`, where the console script is not installed."""

from service.cli import main

main()
