"""Checks that the author of a family runs. This room and `integrations` may import transformers."""
