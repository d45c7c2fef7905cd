"""Reports on a data set: statistics, plots."""
