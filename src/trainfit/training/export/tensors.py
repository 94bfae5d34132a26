"""Read the model tensors of a checkpoint whole, one at a time, whatever mesh has written them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from trainfit.training import shards
from trainfit.training.checkpoint import readable
from trainfit.training.export.safetensors_file import DTYPES

MODEL, OPTIMIZER = "model/", "optimizer/"
"""Prefixes of names of tensors in a checkpoint of several ranks."""
MASTER = "master"
"""Key of the weight that an optimizer keeps in fp32."""
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Parts of names that torch's wrappers of modules add; a technique from outside may use them."""


class Form(NamedTuple):
    """Shape and dtype of a tensor that is not in memory."""

    shape: torch.Size
    dtype: torch.dtype


class CheckpointTensors:
    """The model's tensors in a checkpoint of one or several ranks, by name, and the optimizer's.

    Args:
        folder: the checkpoint, whose bytes have been verified.
    """

    def __init__(self, folder: Path):
        self._shards = shards.Shards(folder) if (folder / shards.INDEX).is_file() else None
        self._files: dict[str, Any] = {}
        """Stored name -> the open file; only where each tensor is whole."""
        self._stored: dict[str, tuple[str, Form]] = {}
        """Name without wrappers -> stored name, and form."""
        for name, form in self._sharded() if self._shards is not None else self._whole(folder):
            self._stored[without_wrappers(name)] = name, form
        self.forms = {
            name.removeprefix(MODEL): form
            for name, (_, form) in self._stored.items()
            if name.startswith(MODEL)
        }
        """Name of a tensor of the model -> its form."""

    def _sharded(self) -> Iterator[tuple[str, Form]]:
        assert self._shards is not None
        for name, one in self._shards.index.items():
            yield name, Form(one.size, one.properties.dtype)

    def _whole(self, folder: Path) -> Iterator[tuple[str, Form]]:
        for kind in (MODEL, OPTIMIZER):
            for path in sorted(folder.glob(f"{kind.rstrip('/')}-*.safetensors")):
                with readable(path):
                    opened: Any = safe_open(path, framework="pt", device="cpu")
                    for name in opened.keys():  # noqa: SIM118
                        part = opened.get_slice(name)
                        yield kind + name, Form(torch.Size(part.get_shape()), DTYPES[part.get_dtype()])
                        self._files[kind + name] = opened

    def read(self, name: str) -> Tensor:
        """Return a whole tensor of the model, or one that ``master`` names, on the CPU."""
        stored, form = self._stored[name if name.startswith(OPTIMIZER) else MODEL + name]
        if self._shards is None:
            return self._files[stored].get_tensor(stored.partition("/")[2])
        whole = torch.empty(form.shape, dtype=form.dtype)
        self._shards.read_into({stored: whole})
        return whole

    def master(self, name: str) -> str | None:
        """Return the name of the optimizer's own copy of a weight, in more bits; None: it keeps none."""
        kept = f"{OPTIMIZER}{name}/{MASTER}"
        return kept if kept in self._stored else None


def without_wrappers(name: str) -> str:
    """Return a tensor's name without the parts that wrappers of modules add."""
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name
