"""Memory plans: what each layer keeps for backward, and what a step takes in bytes and work."""
