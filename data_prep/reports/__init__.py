"""Reports: estimate of a preparation, statistics, plots."""
