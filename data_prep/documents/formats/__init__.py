"""Input formats: file endings, format detection, splitting, documents."""
