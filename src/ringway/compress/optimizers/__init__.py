"""Optimizers that communicate in compressed form."""
