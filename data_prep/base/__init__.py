"""Base library: errors, settings, terminal output, progress, checks of arguments."""
