"""The configuration of a preparation."""
