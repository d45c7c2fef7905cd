"""The MLflow model registry: versions, aliases, promotion, pulling."""
