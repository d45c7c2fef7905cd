"""Configuration of data preparation."""
