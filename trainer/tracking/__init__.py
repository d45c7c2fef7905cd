"""MLflow tracking: a spool on disk, and its delivery to a server."""
