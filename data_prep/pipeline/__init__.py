"""Preparation: plan, map phase, reduce phase, resume."""
