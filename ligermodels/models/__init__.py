"""One file per family, over the base they share."""
