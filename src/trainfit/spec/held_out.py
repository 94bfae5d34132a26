"""The half of all recipes that nothing may be learned from."""

import hashlib


def is_held_out(recipe_id: str) -> bool:
    """Whether a recipe belongs to the half that nothing is learned from: decided by a hash, once and for all."""
    return hashlib.sha256(f"held-out {recipe_id}".encode()).digest()[0] % 2 == 1
