"""From shards to micro-batches: order, packing, masking, sentence pairs."""
