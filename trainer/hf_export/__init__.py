"""From a checkpoint to a folder that transformers loads, behind the parity gate."""
