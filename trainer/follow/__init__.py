"""What follows the checkpoints of a run, in a process beside it: scores of suites, and registration."""
