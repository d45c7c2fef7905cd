"""Evaluation suites of trained models."""
