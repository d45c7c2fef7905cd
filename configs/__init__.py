"""The presets: YAML files that data_prep.settings finds by name, as package data."""
