"""Read the weights of a folder into a model while it is built, one tensor at a time.

A model is read where it would be initialised: each module when its parameters are allocated, so a quantised
layer's weight is in full precision only until it is quantised. A model built on ``meta`` under
``DeferredInit`` records the reads; there each rank reads the rows and columns that it keeps.

At most one file is open, so the host holds no more than its pages and one tensor.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trainfit.models.deferred_init import deferred
from trainfit.models.weights.folder import (
    FETCH_AGAIN,
    Header,
    WeightsFolder,
    adapter_base,
    located,
    open_folder,
)
from trainfit.models.weights.layout import Ranges, Stored
from trainfit.models.weights.match import Matched, dtypes, matched
from trainfit.spec.errors import InputError
from trainfit.spec.units import format_bytes

SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
ROWS_COMPARED = 4096
"""Rows of a matrix that are compared at once."""


class Weights:
    """The weights of one model: ``bind`` it when it is built, ``fill`` its modules, then ``finish``."""

    def __init__(self, folder: WeightsFolder):
        self._folder = folder
        self._found: Matched | None = None
        self._names: dict[int, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._unread: set[str] = set()
        self._dtypes: set[str] = set()
        self._open: tuple[Path, Any] | None = None
        self.adapter: Path | None = None
        """Folder of the adapter that goes with these weights."""
        self.bytes_read = 0
        """Bytes of the folder's tensors that were read, those that were read twice included."""

    @property
    def found(self) -> Matched:
        assert self._found is not None, "the model is bound first"
        return self._found

    def bind(self, model: nn.Module) -> None:
        """Match the folder with a bare model, whose modules are filled from now on.

        Raises:
            InputError: the folder does not fit the model.
        """
        self._found = matched(model, self._folder)
        self._names = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
        self._shapes = {name: tuple(one.shape) for name, one in model.state_dict().items()}
        self._unread = set(self.found.parts)
        if (recorded := deferred()) is not None:
            tensors = model.state_dict(keep_vars=True)
            recorded.forget([tensors[name] for name in self.found.parts])  # Their random values
        for again, first in self.found.again.items():
            self._check_equal(again, first)

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Read the module's own parameters and persistent buffers, not those of its children."""
        prefix = self._names[id(module)]
        recorded = deferred()
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            full_name = f"{prefix}{name}"
            if tensor is None or full_name not in self.found.parts:
                continue
            self._unread.discard(full_name)
            if tensor.is_floating_point():
                self._dtypes.add(str(tensor.dtype).removeprefix("torch."))
            if tensor.is_meta and recorded is not None:
                recorded.read(tensor, partial(self._part, full_name))
            else:
                self._into(full_name, tensor)

    def finish(self, model: nn.Module) -> None:
        """Read what no ``fill`` has read yet."""
        for module in model.modules():
            prefix = self._names.get(id(module))
            if prefix is not None and any(f"{prefix}{name}" in self._unread for name in _own(module)):
                self.fill(module)
        assert not self._unread, f"not read: {sorted(self._unread)[:3]}"

    def close(self) -> None:
        """Close the file that is open."""
        if self._open is not None:
            self._open[1].__exit__(None, None, None)
            self._open = None

    def note(self) -> str:
        """Return a line that says what was read, and the conversion of its dtypes."""
        headers = [header for _, header in self.found.headers()]
        num_bytes = sum(_num_bytes(header) for header in headers)
        stored, kept = dtypes(headers), sorted(SHORT.get(one, one) for one in self._dtypes)
        kinds = " and ".join(stored)
        if stored != kept:
            kinds += f", converted to {' and '.join(kept)}"
        text = (
            f"weights: {len(headers)} tensors, {format_bytes(num_bytes)}, of {self._folder.named}, in {kinds}"
        )
        text += "" if self.adapter is None else f"; the adapter of {self.adapter}"
        left_out = len(self.found.left_out)
        return f"{text}; {left_out} tensors of other parts of the model are not read" if left_out else text

    def _into(self, name: str, tensor: Tensor) -> None:
        for stored in self.found.parts[name]:
            stored.of(tensor).copy_(self._tensor(stored, ()))

    def _part(self, name: str, ranges: Ranges, device: torch.device) -> Tensor:
        """Return a part of a parameter, on the host, in the dtype that it is stored in."""
        shape = self._shapes[name]
        sizes = [one.stop - one.start for one in ranges]
        out: Tensor | None = None
        for stored in self.found.parts[name]:
            overlap = stored.within(shape, ranges)
            if overlap is None:
                continue
            own, into = overlap
            part = self._tensor(stored, own)
            if out is None:
                out = torch.empty(sizes, dtype=part.dtype)
            into.of(out).copy_(part)
        assert out is not None
        return out

    def _tensor(self, stored: Stored, ranges: Ranges) -> Tensor:
        """Return a tensor of the folder, or the ranges of it, as a view of its file."""
        header = self.found.folder.tensors[stored.name]
        try:
            opened = self._opened(header.file)
            tensor = opened.get_slice(stored.name)[ranges] if ranges else opened.get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            problem = f"cannot be read: {error}"
            raise InputError(problem, FETCH_AGAIN, field=stored.name, file=str(header.file)) from None
        self.bytes_read += tensor.nbytes
        return tensor

    def _opened(self, file: Path) -> Any:
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = file, safe_open(str(file), framework="pt").__enter__()
        return self._open[1]

    def _check_equal(self, again: str, first: str) -> None:
        """Refuse an output layer that differs from the embedding that the config ties it to."""
        headers = [self._folder.tensors[name] for name in (again, first)]
        if headers[0].shape == headers[1].shape and headers[0].dtype == headers[1].dtype:
            rows = range(0, headers[0].shape[0], ROWS_COMPARED)
            parts = [
                [
                    self._rows(name, header, start)
                    for name, header in zip((again, first), headers, strict=True)
                ]
                for start in rows
            ]
            if all(torch.equal(one, other) for one, other in parts):
                return
        problem = "differs from the embedding that the config ties it to"
        raise InputError(problem, "set tie_word_embeddings: false", field=again, file=str(headers[0].file))

    def _rows(self, name: str, header: Header, start: int) -> Tensor:
        return self._opened(header.file).get_slice(name)[start : start + ROWS_COMPARED]


def open_weights(weights: str) -> Weights:
    """Return the weights that ``model.weights`` names, fetched where they are not cached.

    Of a folder with an adapter, those of its base model; ``adapter`` is the folder.

    Raises:
        InputError: no such folder or repository, or no safetensors in it.
    """
    path = located(weights, fetch=True)
    assert path is not None
    base = adapter_base(path)
    if base is None:
        return Weights(open_folder(path, weights))
    of_base = located(base, fetch=True)
    assert of_base is not None
    found = Weights(open_folder(of_base, base))  # Refuses an adapter of an adapter.
    found.adapter = path
    return found


def read_folder(model: nn.Module, folder: Path) -> None:
    """Read a folder's weights into a bare model that is built, in the dtypes of the model.

    Raises:
        InputError: the folder does not fit the model; nothing is changed.
    """
    weights = Weights(open_folder(folder, str(folder)))
    weights.bind(model)
    weights.finish(model)
    weights.close()


def _own(module: nn.Module) -> list[str]:
    return [*module._parameters, *module._buffers]


def _num_bytes(header: Header) -> int:
    return math.prod(header.shape) * BYTES[header.dtype] if header.dtype in BYTES else 0
