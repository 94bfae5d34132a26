"""Dtypes of weights and compute."""
