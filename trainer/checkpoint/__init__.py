"""Checkpoints: saving, resuming, keeping, copying to remote storage."""
