"""Fine-tuning: data, packing, the trainer and the run directory."""
