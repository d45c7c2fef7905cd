"""Speed, health, custom metrics."""
