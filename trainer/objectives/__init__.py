"""Objectives: heads, losses, metrics."""
