"""Where a model's repeated decoder blocks are, found by structure, not by name; and how many positions it has.

Works for transformers models, the same wrapped by PEFT, and our native decoder, because every one keeps its blocks in
a ``nn.ModuleList`` of few classes (one, except in hybrids that alternate attention with state-space blocks).
"""

from typing import Any

from torch import nn

from trainfit.spec.errors import InputError

POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "pos_emb")
"""What transformers' models call an embedding of positions."""

ORIGINAL = "trainfit_original"
"""Attribute of a class that a technique made of a block's: the block's own class."""


def max_positions(model: nn.Module) -> int | None:
    """Rows of the model's table of learned positions; None where it has none (rotary, ALiBi)."""
    tables = [
        module.num_embeddings - getattr(module, "offset", 0)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in POSITION_TABLES
    ]
    return min(tables, default=None)


def layer_lists(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Dotted names and ModuleLists of the repeated decoder blocks, in ``named_modules`` order.

    A list counts when its children are of one class (or at most half as many classes as children) and it does not stand inside another such list (experts inside a
    block are not decoder blocks). Of several, those are kept that hold at least half as many parameters as the
    largest: a decoder with two stacks gives both, a small side list (prediction heads) gives none.
    A model without such a list gives an empty list.
    """
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(outer + ".") for outer, _ in found)
        if not inside and isinstance(module, nn.ModuleList) and _is_repeated(module):
            found.append((name, module))
    if len(found) == 1 and any(parameter.numel() for parameter in found[0][1].parameters()):
        return found  # All is counted only where there is something to compare.
    largest = max((_num_parameters(blocks) for _, blocks in found), default=0)
    return [(name, blocks) for name, blocks in found if largest and 2 * _num_parameters(blocks) >= largest]


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks, first to last; none where it has no list of them."""
    return [block for _, found in layer_lists(model) for block in found]


def require_blocks(model: nn.Module, field: str, value: Any, remedy: str) -> list[nn.Module]:
    """The model's repeated blocks, first to last.

    Raises:
        InputError: there are none; ``field`` and ``value`` of the recipe asked for them.
    """
    blocks = decoder_blocks(model)
    if not blocks:
        raise InputError("no repeated blocks were found in this model", remedy, field=field, value=value)
    return blocks


def num_quantized(module: nn.Module) -> int:
    """Weights of the module that are stored as codes and so are not among its parameters."""
    return sum(getattr(part, "num_quantized", 0) for part in module.modules())


def _is_repeated(blocks: nn.ModuleList) -> bool:
    classes = {getattr(block, ORIGINAL, type(block)) for block in blocks}
    return len(blocks) > 0 and len(classes) <= max(1, len(blocks) // 2)


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters()) + num_quantized(module)
