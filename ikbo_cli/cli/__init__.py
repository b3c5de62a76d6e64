"""The command line: thin typer commands."""
