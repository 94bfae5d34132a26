"""Held-out set: the half of all recipes from which neither rates nor rules are learned."""

import hashlib
from functools import cache

from evidence.scripts.tables.joined import RESULTS

PREVIOUS_IDS = RESULTS / "previous-ids.txt"


def is_held_out(recipe_id: str) -> bool:
    """Return whether a recipe is held out: a hash of the id under which it was first recorded is odd."""
    first = _first_ids().get(recipe_id, recipe_id)
    return hashlib.sha256(f"held-out {first}".encode()).digest()[0] % 2 == 1


@cache
def previous_ids() -> dict[str, str]:
    """Return the id that a recipe had until 2026-11-26 -> its id, of all that ``evidence/records/`` names."""
    lines = PREVIOUS_IDS.read_text("utf-8").splitlines()
    pairs = (line.split() for line in lines if not line.startswith("#"))
    return {before: now for before, now in pairs}


@cache
def _first_ids() -> dict[str, str]:
    return {now: before for before, now in previous_ids().items()}
