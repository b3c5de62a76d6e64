"""`python -m ikbo_cli`."""

from ikbo_cli.cli.app import main

main()
