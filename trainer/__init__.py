"""Pretraining with DeepSpeed ZeRO, and what is done with its checkpoints."""
