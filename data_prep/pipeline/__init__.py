"""Preparation pipeline: plan, map phase, reduce phase, resume."""
