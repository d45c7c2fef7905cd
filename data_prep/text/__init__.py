"""What is done to text before a tokenizer sees it: cleaning and sentence boundaries."""
