"""How a model is cut over ranks, and what of its activations is kept."""
