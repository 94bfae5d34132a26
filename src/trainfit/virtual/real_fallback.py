"""Operations that PyTorch can only run for real: of a few it has no fake kernel, and runs them on zeros in silence."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from trainfit.spec.errors import InputError
from trainfit.spec.units import format_bytes
from trainfit.virtual.exclusive import replaced

LARGEST_BYTES = 64 << 20
"""Inputs of an operation that is let run for real."""


@contextmanager
def fallbacks_told(said: set[str]) -> Iterator[None]:
    """What runs for real is small, and said.

    Args:
        said: gets a sentence for each such operation.
    Raises:
        InputError: inside, where an operation's inputs are too large for that: zeros in their place would take the memory
            that a virtual GPU is to spare.
    """
    original = fake_tensor.run_fallback_kernel

    def run(mode: Any, func: Any, flat_args: Any, *rest: Any) -> Any:
        size = sum(t.numel() * t.element_size() for t in flat_args if isinstance(t, FakeTensor))
        if size > LARGEST_BYTES:
            raise InputError(
                f"{func} on {format_bytes(size)}: PyTorch {torch.__version__} tells its result only by running it",
                "leave it out, or replace it with operations that have a fake kernel",
                field="step",
                value=str(func),
            )
        said.add(f"{func}: PyTorch tells its result only by running it; it was run on zeros")
        return original(mode, func, flat_args, *rest)

    with replaced(fake_tensor, "run_fallback_kernel", run):
        yield
