"""Trained models: find, download, check, use."""
