"""Command line, with estimates and reports."""
