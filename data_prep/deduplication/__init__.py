"""Near-duplicate detection: signatures, similarity search, list of dropped documents."""
