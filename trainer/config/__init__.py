"""Settings, learning-rate schedule, promotion rules."""
