"""Executors: run work units in this process, in a pool of processes or on a Dask cluster."""
