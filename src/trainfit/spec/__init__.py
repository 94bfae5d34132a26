"""The nouns: frozen, strict values that every room speaks. No torch here."""

DEFAULT_GPU = "h200"
"""GPU of a recipe or command that names none."""
