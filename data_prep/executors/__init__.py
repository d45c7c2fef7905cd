"""Running work units: in this process, in a pool of processes or on a Dask cluster, and phases made of them."""
