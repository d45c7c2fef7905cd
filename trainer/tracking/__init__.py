"""MLflow tracking: journal on disk, delivery to a server, curves."""
