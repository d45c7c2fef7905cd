"""Document filters and transforms: protocols, registry, built-in filters, filtered reader."""
