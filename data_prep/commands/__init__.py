"""The subcommands of `python -m data_prep`: each module adds its arguments to a parser and runs."""
