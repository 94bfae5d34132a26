"""Closed forms of model FLOPs by model type, and what a layer computes and sends; no torch."""
