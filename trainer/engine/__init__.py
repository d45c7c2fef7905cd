"""The DeepSpeed engine: its configuration, its optimizer, and the training state at every ZeRO stage."""
