"""Activations and weights in pinned host memory."""
