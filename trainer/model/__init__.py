"""Encoder and heads: from a batch to the loss; sizes."""
