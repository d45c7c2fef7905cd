"""Use of a trained encoder: filling masks, vectors, sentence pairs, attention; opening any model that a user names."""
