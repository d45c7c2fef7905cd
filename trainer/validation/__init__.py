"""What a training run measures of its own model: validation loss and minimal pairs."""
