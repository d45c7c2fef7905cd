"""Evaluation: validation loss, minimal pairs, suites."""
