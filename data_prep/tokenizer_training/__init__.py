"""Tokenizer training: sample of the corpus, training, quality report."""
