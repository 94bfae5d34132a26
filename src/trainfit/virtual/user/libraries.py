"""Caches and states of libraries above PyTorch, reset so that they find the virtual GPU."""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import _utils
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.host_tensors import on_host

CACHED_QUERIES = ("torch", "cuda", "grouped_mm", "flash")
"""Parts of the names of transformers' and accelerate's cached queries of the machine."""


@contextmanager
def libraries(notes: set[str]) -> Iterator[None]:
    """Let transformers and accelerate find the virtual GPU, load data in this process and save nothing."""
    write = torch.save

    def save(obj: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(obj, torch.UntypedStorage | torch.TypedStorage):  # pickle of a host tensor
            on_host(write, (obj, *args), kwargs)
            return
        notes.add("torch.save wrote nothing: there are no values to keep")

    _clear_queries()
    before = [dict(state) for state in _accelerate_states()]
    for state in _accelerate_states():
        state.clear()
    with ExitStack() as stack:
        stack.callback(_clear_queries)
        stack.callback(_restore_states, before)
        stack.enter_context(replaced(DataLoader, "_get_iterator", _in_this_process))
        stack.enter_context(replaced(torch, "save", save))
        stack.enter_context(replaced(torch, "load", _loading(torch.load)))
        stack.enter_context(replaced(_utils, "_rebuild_tensor", _rebuilding(_utils._rebuild_tensor)))
        yield


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    """Load tensors from bytes in memory (pickle) as real ones, from a file as fake ones."""

    def load(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, io.BytesIO):
            return on_host(original, (file, *args), kwargs)
        return original(file, *args, **kwargs)

    return load


def _rebuilding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Rebuild a tensor around a host storage (``copy.copy``, pickle) as a real one."""

    def rebuild(storage: Any, *args: Any) -> Any:
        if storage.device.type == "cpu":
            return on_host(original, (storage, *args), {})
        return original(storage, *args)

    return rebuild


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
