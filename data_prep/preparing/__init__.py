"""The phases that turn inputs into shards, and the engines that run them."""
