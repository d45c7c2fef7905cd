"""Training loop: setup, steps, saving, reporting."""
