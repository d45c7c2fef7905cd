"""Settings of data preparation."""
