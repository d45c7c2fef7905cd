"""Tokenizer training: corpus sample, training."""
