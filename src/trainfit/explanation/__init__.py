"""Predictions held against measurements, and what held the memory."""
