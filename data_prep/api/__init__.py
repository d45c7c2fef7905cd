"""The Python API of preparation, on which the commands are built; import its names from `data_prep`."""
