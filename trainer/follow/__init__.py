"""Registration and suites beside training."""
