"""Fine-tuning: the data, its packing, the trainer and the folder of a run."""
