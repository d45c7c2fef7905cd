"""Preparation of pretraining data: text in, a tokenizer and verified webdataset shards out."""
