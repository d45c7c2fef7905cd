"""What follows a run's checkpoints beside training: registration and suites of evaluations."""
