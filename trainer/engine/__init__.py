"""DeepSpeed engine around any model; optimizers."""
