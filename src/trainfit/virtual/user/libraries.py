"""What libraries above PyTorch remember about the machine, forgotten for a while: they ask anew, and hear of "cuda"."""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import _utils
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.host_tensors import on_host

ASK_THE_MACHINE = ("torch", "cuda", "grouped_mm", "flash")
"""Parts of the names of transformers' and accelerate's questions that they keep the answers to."""


@contextmanager
def libraries(notes: set[str]) -> Iterator[None]:
    """transformers and accelerate find the virtual GPU; data is loaded in this process; nothing is saved.

    Args:
        said: gets a sentence if the code saves something.
    """

    write = torch.save

    def save(obj: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(obj, torch.UntypedStorage | torch.TypedStorage):  # pickle's way with a host tensor
            on_host(write, (obj, *args), kwargs)
            return
        notes.add("torch.save wrote nothing: there are no values to keep")

    _forget_answers()
    kept = _take_states()
    with ExitStack() as stack:
        stack.callback(_forget_answers)
        stack.callback(_put_back, kept)
        stack.enter_context(replaced(DataLoader, "_get_iterator", _in_this_process))
        stack.enter_context(replaced(torch, "save", save))
        stack.enter_context(replaced(torch, "load", _loading(torch.load)))
        stack.enter_context(replaced(_utils, "_rebuild_tensor", _rebuilding(_utils._rebuild_tensor)))
        yield


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    """What is read from bytes in memory, as pickle does, is real; what is read from a file stays fake."""

    def load(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, io.BytesIO):
            return on_host(original, (file, *args), kwargs)
        return original(file, *args, **kwargs)

    return load


def _rebuilding(original: Callable[..., Any]) -> Callable[..., Any]:
    """``copy.copy`` and pickle put a new tensor around a storage: a real one where the storage is the host's."""

    def rebuild(storage: Any, *args: Any) -> Any:
        if storage.device.type == "cpu":
            return on_host(original, (storage, *args), {})
        return original(storage, *args)

    return rebuild


def _in_this_process(loader: Any) -> Any:
    """An iterator without workers: a forked one would find itself inside the virtual GPU."""
    before = {name: vars(loader)[name] for name in ("num_workers", "timeout")}
    vars(loader).update(num_workers=0, timeout=0)
    try:
        return _SingleProcessDataLoaderIter(loader)
    finally:
        vars(loader).update(before)


def _forget_answers() -> None:
    for name in ("transformers.utils.import_utils", "accelerate.utils.imports"):
        for question, answer in vars(sys.modules.get(name, object)).items():
            if hasattr(answer, "cache_clear") and any(part in question for part in ASK_THE_MACHINE):
                answer.cache_clear()


def _take_states() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Empty accelerate's process-wide states; what was in them."""
    taken = []
    for state in _accelerate_states():
        taken.append((state, dict(state)))
        state.clear()
    return taken


def _put_back(taken: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for state in _accelerate_states():
        state.clear()
    for state, before in taken:
        state.update(before)


def _accelerate_states() -> list[dict[str, Any]]:
    module = sys.modules.get("accelerate.state")
    names = ("PartialState", "AcceleratorState", "GradientState")
    return [getattr(module, name)._shared_state for name in names] if module else []
