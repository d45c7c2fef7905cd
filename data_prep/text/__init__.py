"""Text processing before tokenization: cleaning, sentence boundaries."""
