"""What a model is trained to predict: heads, losses and what is measured of them, one file for each objective."""
