"""Prepared data sets: shards, verification, removal."""
