"""Subcommands of `python -m data_prep`."""
