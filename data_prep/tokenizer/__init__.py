"""Tokenizers: format, encoding, word cache."""
