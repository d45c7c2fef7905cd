"""Export to Hugging Face format, parity check."""
