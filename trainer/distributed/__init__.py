"""Processes of a run: rendezvous, watchdog, exit."""
