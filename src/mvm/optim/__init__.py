"""Optimizers, and averages of the weights."""
