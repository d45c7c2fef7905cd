"""Encoder, heads and loss; sizes."""
