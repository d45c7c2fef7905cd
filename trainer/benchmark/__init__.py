"""Measuring how fast the trainer is."""
