"""Weights of a folder in the Hugging Face layout: their names, their files, and reading them into a model."""
