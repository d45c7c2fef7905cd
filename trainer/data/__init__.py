"""Batches of a rank: sample order, packing, masking."""
