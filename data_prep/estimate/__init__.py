"""Size and time of a preparation, from a sample."""
