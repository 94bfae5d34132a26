"""Synthetic documents from a grammar (``synthetic.json``): deterministic, any number, with a known entropy.

The entropy of the choices behind a document bounds every model from below: on unseen documents, the mean
perplexity per token is at least 2 ** (bits / tokens). Names, pronouns and objects agree within a document, so
there is more to learn than word order.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


@cache
def _grammar() -> dict[str, Any]:
    """Return ``words``, the options of each choice, and ``documents``: their choices in order, and texts."""
    return json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


@dataclass(frozen=True)
class SyntheticText:
    """``text`` without a final newline; ``bits``: the entropy of the choices behind it."""

    text: str
    bits: float


class _Choices:
    """Equally likely choices from the digits of a hash: independent of Python version and platform."""

    def __init__(self, seed: int, index: int):
        digest = hashlib.shake_256(f"trainfit story {seed} {index}".encode()).digest(64)
        self._left = int.from_bytes(digest, "big")
        self.bits = 0.0

    def of(self, options: Sequence[T]) -> T:
        self._left, pick = divmod(self._left, len(options))
        self.bits += math.log2(len(options))
        return options[pick]


def synthetic_text(seed: int, index: int) -> SyntheticText:
    """Return document ``index`` of ``seed``."""
    choose, words = _Choices(seed, index), _grammar()["words"]
    document = choose.of(_grammar()["documents"])
    chosen: dict[str, str] = {}
    for name in document["choices"]:
        if name == "name":
            chosen["name"], chosen["they"], chosen["their"] = choose.of(words["name"])
            chosen["They"] = chosen["they"].capitalize()
        elif name == "friend":
            chosen["friend"] = choose.of([one for one, *_ in words["name"] if one != chosen["name"]])
        else:
            chosen[name] = choose.of(words[name])
    return SyntheticText("\n".join(document["text"]).format_map(chosen), choose.bits)
