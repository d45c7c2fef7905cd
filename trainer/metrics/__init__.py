"""Throughput, health."""
