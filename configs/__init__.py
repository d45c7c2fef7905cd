"""Presets: YAML files, found by name as package data."""
