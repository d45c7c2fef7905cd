"""MLflow model registry: versions, aliases, promotion."""
