"""Finding documents that are nearly the same, and the list of those to leave out."""
