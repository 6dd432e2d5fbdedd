"""Losses as plain functions of what the loss head says of each token: the field's own formulas."""
