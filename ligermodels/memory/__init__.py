"""Memory plans: what each layer keeps for backward, and where."""
