"""Encoder, attention; sizes."""
