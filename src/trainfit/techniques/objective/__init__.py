"""Losses of objectives other than next-token prediction."""
