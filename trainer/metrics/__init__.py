"""Throughput, health and status file of a run."""
