"""The tensors among an operation's arguments or results."""

from typing import Any

import torch
from torch import Tensor

NESTED = (list, tuple, dict)
LEAVES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})
"""What most arguments are that hold no tensor."""


def tensors_of(tree: Any) -> list[Tensor]:
    """Of an operation's arguments or results, which are nested in lists, tuples and dicts alone, in order."""
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
