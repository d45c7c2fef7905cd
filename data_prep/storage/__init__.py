"""Storage: local disks and object stores, locks."""
