"""Training on Kubernetes."""
