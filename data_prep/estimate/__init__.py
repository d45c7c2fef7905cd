"""Estimates of size and time, extrapolated from a sample."""
