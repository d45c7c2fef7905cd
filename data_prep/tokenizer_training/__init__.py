"""Training a tokenizer: the sample of the corpus, the training itself, and the report on what came of it."""
