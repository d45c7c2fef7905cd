"""Input documents: text, JSON, CSV, Parquet, Arrow."""
