"""Reading documents from input files, and cutting the files into units of work."""
