"""The tensors among an operation's arguments or results."""

from typing import Any

import torch
from torch import Tensor

NESTED = (list, tuple, dict)
LEAVES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})
"""Types of most arguments that hold no tensor."""


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors nested in lists, tuples and dicts of arguments or results, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, NESTED):
        return []
    found: list[Tensor] = []
    for item in tree:
        if type(item) in LEAVES:
            continue
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, NESTED):
            found += tensors_of(item)
    return found
