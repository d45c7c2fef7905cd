"""The presets: YAML files that data_prep.base.settings finds by name, as package data."""
