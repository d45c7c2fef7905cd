"""Export to Hugging Face format, with a parity check."""
