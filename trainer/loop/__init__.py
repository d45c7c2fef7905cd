"""Training loop: setup, steps, stages, saving."""
