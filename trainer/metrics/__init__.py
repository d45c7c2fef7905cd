"""Metrics of a run: throughput, health, status file, log lines."""
