"""Tokenizers: a folder of one, exact and fast encoding, foreign ones, and the twin in Hugging Face's format."""
