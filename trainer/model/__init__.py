"""Encoder and heads: BERT, ModernBERT, sizes, weights under their transformers names."""
