"""Evaluation of the model that is being trained."""
