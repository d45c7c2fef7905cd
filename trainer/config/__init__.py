"""The sections of a training run's configuration, one file each."""
