"""Executors: this process, process pool, Dask cluster."""
