"""Document filters: registry, built-in filters."""
