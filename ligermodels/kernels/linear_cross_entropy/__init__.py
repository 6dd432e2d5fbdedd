"""The loss head's op."""
