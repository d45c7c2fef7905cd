"""Text before tokenization: cleaning, sentences."""
