"""Export a checkpoint to a directory that transformers loads, behind the parity gate."""
