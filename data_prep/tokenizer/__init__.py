"""Tokenizers: format, encoding, pretrained tokenizers, Hugging Face export."""
