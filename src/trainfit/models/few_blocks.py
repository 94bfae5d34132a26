"""Build only those decoder blocks that a trace keeps; the others are outlines.

An outline is the same block on ``meta``, made outside the modes of the virtual GPU and never initialised: it
has the structure by which equal blocks are found, at a tenth of the cost.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.process_state import no_function_modes

META = torch.device("meta")
NUMBER = "_trainfit_outline"
"""Attribute of an outline: its number, in a tuple, which ``repeated_layers.signature`` does not compare."""
INITIALISED = "_is_hf_initialized"
"""transformers' attribute of a module that it need not initialise."""

_is_built: ContextVar[Callable[[int, int], bool] | None] = ContextVar("is_built", default=None)


class OutlinesLeftError(Exception):
    """A trace needs blocks that are outlines.

    Attributes:
        numbers: of all blocks that the model has after it was shortened.
    """

    def __init__(self, numbers: frozenset[int]):
        super().__init__(f"blocks {sorted(numbers)} are outlines")
        self.numbers = numbers


@contextmanager
def few_blocks(is_built: Callable[[int, int], bool]) -> Iterator[None]:
    """Make outlines of the blocks for which ``is_built(number, number of blocks)`` is False."""
    token = _is_built.set(is_built)
    try:
        yield
    finally:
        _is_built.reset(token)


def block_or_outline(
    build: Callable[[], nn.Module], outline: Callable[[], nn.Module], number: int, num_blocks: int
) -> nn.Module:
    """Return a block of a model, or an outline of it where ``few_blocks`` says so.

    Args:
        build: builds the block where it belongs.
        outline: builds it on ``meta``; ``build`` is called if that fails.
    """
    is_built = _is_built.get()
    if is_built is None:
        return build()
    is_whole = is_built(number, num_blocks)
    if is_whole:
        block = build()
    else:
        try:
            with _disable_current_modes(), no_function_modes(), META:
                block = outline()
        except Exception:  # It reads values, which a meta tensor lacks.
            block, is_whole = build(), True
        else:
            for module in block.modules():
                setattr(module, INITIALISED, True)
    object.__setattr__(block, NUMBER, (number, is_whole))
    return block


@contextmanager
def outlined(kind: type[nn.Module] | None, num_blocks: int) -> Iterator[None]:
    """Make outlines of the blocks of another library's class that are made inside, as ``few_blocks`` says."""
    if _is_built.get() is None or kind is None:
        yield
        return
    original: Any = kind.__init__
    numbers = itertools.count()

    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        def build(**given: Any) -> nn.Module:
            original(self, *args, **{**kwargs, **given})
            return self

        on_meta = {"device": META} if "device" in kwargs else {}
        block_or_outline(build, lambda: build(**on_meta), next(numbers), num_blocks)

    with replaced(kind, "__init__", init):
        yield


def is_outline(module: nn.Module) -> bool:
    """Return whether a block is an outline."""
    return not vars(module).get(NUMBER, (0, True))[1]


def without_outlines(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules within one, itself first, but none of an outline."""
    yield module
    for child in module.children():
        if not is_outline(child):
            yield from without_outlines(child)


def check_no_outlines(blocks: list[nn.Module]) -> None:
    """Check the blocks that a shortened model has.

    Raises:
        OutlinesLeftError: some are outlines.
    """
    if any(map(is_outline, blocks)):
        raise OutlinesLeftError(
            frozenset(vars(block)[NUMBER][0] for block in blocks if NUMBER in vars(block))
        )
