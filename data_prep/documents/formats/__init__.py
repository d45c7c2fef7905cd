"""The formats of inputs, one object each: endings, splitting, first bytes and documents."""
