"""The base library of the project: errors, settings, terminal, progress, checks."""
