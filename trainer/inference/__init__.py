"""Inference: masked tokens, embeddings, sentence pairs, attention."""
