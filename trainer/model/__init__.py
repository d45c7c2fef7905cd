"""The encoder and its heads: BERT and ModernBERT, their sizes, and their weights as transformers names them."""
