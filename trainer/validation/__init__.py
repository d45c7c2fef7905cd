"""Validation loss and minimal pairs of a run."""
