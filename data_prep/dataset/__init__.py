"""Prepared data sets: shards, manifest, versions, verification, removal of documents."""
