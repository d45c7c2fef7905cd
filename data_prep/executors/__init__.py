"""Executors of work units: this process, a process pool, a Dask cluster."""
