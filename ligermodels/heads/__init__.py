"""Heads on a body beside the loss head: classifiers, embeddings, Medusa and multi-token heads."""
