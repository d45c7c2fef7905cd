"""Filters and transforms of documents: protocols, registry, the built-in ones, and the reader that applies them."""
