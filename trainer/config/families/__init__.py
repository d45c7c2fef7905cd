"""Model families, one file each: published options, rules, transformers' classes, names and config.json both ways."""
