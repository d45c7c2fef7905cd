"""Evaluation during and after training: validation loss, minimal pairs."""
