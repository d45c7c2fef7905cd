"""The phases that turn inputs into shards."""
