"""Caches and states of libraries above PyTorch, reset so that they find the virtual GPU."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from trainfit.virtual import torch_internals
from trainfit.virtual.trace.exclusive import replaced

CACHED_QUERIES = ("torch", "cuda", "grouped_mm", "flash")
"""Parts of the names of transformers' and accelerate's cached queries of the machine."""


@contextmanager
def libraries() -> Iterator[None]:
    """Let transformers and accelerate find the virtual GPU, and load data in this process."""
    if "accelerate.state" in sys.modules:
        torch_internals.require("accelerate")
    _clear_queries()
    before = [dict(state) for state in _accelerate_states()]
    for state in _accelerate_states():
        state.clear()
    # transformers would load weights in threads, which are not traced (``restored_environment`` undoes it).
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    with ExitStack() as stack:
        stack.callback(_clear_queries)
        stack.callback(_restore_states, before)
        stack.enter_context(replaced(DataLoader, "_get_iterator", _in_this_process))
        yield


def _in_this_process(loader: Any) -> Any:
    """Return an iterator without workers, which would be forked inside the virtual GPU."""
    before = {name: vars(loader)[name] for name in ("num_workers", "timeout")}
    vars(loader).update(num_workers=0, timeout=0)
    try:
        return _SingleProcessDataLoaderIter(loader)
    finally:
        vars(loader).update(before)


def _clear_queries() -> None:
    for module in ("transformers.utils.import_utils", "accelerate.utils.imports"):
        for name, query in vars(sys.modules.get(module, object)).items():
            if hasattr(query, "cache_clear") and any(part in name for part in CACHED_QUERIES):
                query.cache_clear()


def _restore_states(before: list[dict[str, Any]]) -> None:
    """Restore accelerate's process-wide states; those of a module imported since are emptied."""
    for state, content in zip_longest(_accelerate_states(), before, fillvalue={}):
        state.clear()
        state.update(content)


def _accelerate_states() -> list[dict[str, Any]]:
    module = sys.modules.get("accelerate.state")
    names = ("PartialState", "AcceleratorState", "GradientState")
    return [getattr(module, name)._shared_state for name in names] if module else []
