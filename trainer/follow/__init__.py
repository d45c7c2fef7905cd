"""Scores and registration of checkpoints, in a process beside training."""
