"""Python API: train_tokenizer, prepare, open_dataset. Import its names from `data_prep`."""
