"""Configuration of a training run, one module per section."""
