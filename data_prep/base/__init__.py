"""Base library: errors, settings, terminal output."""
