"""Near-duplicates by tokens: signatures, search."""
