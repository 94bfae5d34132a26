"""Switch PyTorch between its fastest kernels and deterministic ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic_kernels(wanted: bool = True) -> Iterator[None]:
    """Set ``torch.use_deterministic_algorithms(wanted)`` and restore the previous setting on exit.

    Uninitialised memory is not filled inside: no kernel of this package reads memory that it has not written.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    setting: Any = torch.utils.deterministic  # Typed Any: the attribute is a property of the module's class.
    filled = setting.fill_uninitialized_memory
    torch.use_deterministic_algorithms(wanted)
    setting.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        setting.fill_uninitialized_memory = filled
