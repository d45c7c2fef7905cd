"""Doctor and dry run: checks, memory estimate."""
