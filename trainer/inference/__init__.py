"""What one does with a trained encoder: masks filled, vectors, sentence pairs, attention."""
