"""Data loading: sample order, packing, masking, sentence pairs, micro-batches."""
