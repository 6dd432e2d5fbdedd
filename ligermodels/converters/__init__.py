"""Convert Hugging Face checkpoints: weight maps, configs, reading, writing and the hub."""
