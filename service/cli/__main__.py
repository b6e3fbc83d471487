"""`python -m service.cli`, for whoever has an interpreter and no console script."""

from service.cli import main

main()
