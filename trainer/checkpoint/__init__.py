"""Checkpoints: write, resume, retention, remote copies."""
