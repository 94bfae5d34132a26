"""Techniques: one file each, plain functions on a plain model. See docs/reference/techniques.md."""
