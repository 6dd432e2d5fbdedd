"""Checks that the author of a family runs."""
