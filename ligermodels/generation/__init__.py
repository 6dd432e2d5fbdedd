"""Generation of tokens from a model."""
