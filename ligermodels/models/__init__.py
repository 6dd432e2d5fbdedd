"""The model families: one file per family, and the base class that they share."""
