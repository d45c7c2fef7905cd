"""MLflow tracking: a journal on disk, and its delivery to a server."""
