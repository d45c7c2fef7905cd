"""Reports about a data set: statistics, plots, decoded documents."""
