"""Checks and estimates before a run burns anything."""
