"""MLflow tracking: journal on disk, delivery; status."""
