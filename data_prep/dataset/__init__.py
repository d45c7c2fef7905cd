"""The finished data set: shards, manifest, versions, and the checks on them."""
