"""Commands of data preparation."""
