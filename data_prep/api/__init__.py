"""Python API of data preparation; import its names from `data_prep`."""
