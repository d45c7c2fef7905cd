"""Training jobs on Kubernetes."""
