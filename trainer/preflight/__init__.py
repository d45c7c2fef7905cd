"""Checks and estimates before a run."""
