"""Input documents: readers, input formats, division of files into work units."""
