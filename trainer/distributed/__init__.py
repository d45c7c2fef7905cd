"""Distributed processes: rendezvous, process groups, watchdog, signals, exit."""
