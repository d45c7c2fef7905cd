"""Tokenizers: training one, its folder, exact and fast encoding, and its twin in Hugging Face's format."""
