"""Files wherever they lie: local disks and object stores, locks, retries, compression."""
