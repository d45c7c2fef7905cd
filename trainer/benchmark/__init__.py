"""Throughput measurement."""
