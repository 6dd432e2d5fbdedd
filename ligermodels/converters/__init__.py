"""Hugging Face checkpoints in and out: the span table, configs, reading, writing, the hub."""
