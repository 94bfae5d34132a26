"""Optimizers, and how their update is made."""
