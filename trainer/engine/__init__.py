"""DeepSpeed engine: configuration, optimizers, training state at every ZeRO stage."""
