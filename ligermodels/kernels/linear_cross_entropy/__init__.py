"""The ops of the loss head: `linear_cross_entropy` and `linear_log_probs`."""
