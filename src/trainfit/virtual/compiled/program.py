"""Inductor's program, run on the virtual GPU.

The source is a Python module that allocates buffers, launches Triton kernels, calls PyTorch's own operations and
deletes what it needs no more. Here it runs as it is, its imports answered by what the virtual GPU has: a buffer is a
fake tensor, a Triton kernel an entry in the ledger, and every other operation runs on fake tensors under the tracer.
"""

import builtins
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from trainfit.virtual.compiled.generate import AT, Kernel, Source
from trainfit.virtual.ledger import FIRST, LAST, NO_LAYER
from trainfit.virtual.places import NOWHERE, Place, Places
from trainfit.virtual.tracer import Tracer

aten = torch.ops.aten
CPU = torch.device("cpu")


class Program:
    """Call it with a list of inputs, which it empties; it returns the outputs."""

    def __init__(self, source: Source, tracer: Tracer, places: Places):
        self._kernels, self._is_backward = source.kernels, source.is_backward
        self._tracer, self._places = tracer, places
        self._kernel = Kernel(0, (), False)
        self._base = self._last = NOWHERE
        self._is_past_layers = False
        self._call = self._load(source)

    def __call__(self, inputs: list[Any]) -> Any:
        self._base = self._last = self._places.current()
        self._is_past_layers = False
        self._places.override = self._base
        try:
            return self._call(inputs)
        finally:
            self._places.override = None

    def _load(self, source: Source) -> Callable[[list[Any]], Any]:
        names: dict[str, Any] = {"__name__": "inductor_program", "__builtins__": {**vars(builtins), "__import__": self._import}}
        exec(compile(source.text, "<inductor program>", "exec"), names)
        names.update(source.constants)
        names.update(
            {
                "torch": _Overlaid(torch, cuda=_Anything(), device=_device),
                "device": _device,
                "empty_strided_cuda": _empty_strided,
                "empty_strided_cpu": _empty_strided_on_host,
                "reinterpret_tensor": _reinterpret,
                "assert_size_stride": _nothing,
                "assert_alignment": _nothing,
                "get_raw_stream": _nothing,
                AT: self._at,
            }
        )
        return names["call"]

    def _import(self, name: str, module_globals: Any = None, module_locals: Any = None, wanted: Any = (), level: int = 0) -> Any:
        if name.partition(".")[0] == "triton":
            return _Anything()
        if name == "torch._inductor.async_compile":
            return SimpleNamespace(AsyncCompile=lambda: _Kernels(self._launch))
        found = builtins.__import__(name, module_globals, module_locals, wanted, level)
        # A CPU build lacks CUDA's names; the program gets ours in their place afterwards.
        return _Overlaid(found, **{key: _nothing for key in wanted or () if not hasattr(found, key)})

    def _at(self, index: int) -> None:
        self._kernel = self._kernels[index]
        self._last = self._places.override = self._place(self._kernel)

    def _place(self, kernel: Kernel) -> Place:
        """Where the kernel is: of the layers it fuses the one that runs last, and never back in a layer left before.

        So what the program does late for a layer happens where it happens: in the next layer's time.
        """
        place = self._last
        if self._base.group == NO_LAYER:
            prefix = f"{self._base.module}." if self._base.module else ""
            places = [self._places.find(prefix + name) for name in kernel.modules]
            inside = [found for found in places if found.group != NO_LAYER]
            onwards = [found for found in inside if place.group == NO_LAYER or self._progress(found) >= self._progress(place)]
            if self._is_past_layers:
                place = self._base
            elif onwards:
                place = max(onwards, key=self._progress)
            elif places and not inside and self._is_in_last_layer(place):
                self._is_past_layers, place = True, self._base
        return place._replace(recomputing=kernel.recomputes, in_autograd=self._base.in_autograd)

    def _progress(self, place: Place) -> int:
        """How far a place in the layers is: the backward walks them down."""
        return -place.group if self._is_backward else place.group

    def _is_in_last_layer(self, place: Place) -> bool:
        return place.group == (FIRST if self._is_backward else LAST)

    def _launch(self, name: str, args: tuple[Any, ...]) -> None:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.int64)
        self._tracer.launched(name, self._kernel.num_bytes, str(dtype).removeprefix("torch."))
        # A second kernel of the same scheduled node reads and writes what is counted already.
        self._kernel = self._kernel._replace(num_bytes=0)


class _Kernels:
    """Stands for Inductor's ``AsyncCompile``: nothing is compiled, a launch is told."""

    def __init__(self, launch: Callable[[str, tuple[Any, ...]], None]):
        self._launch = launch

    def triton(self, name: str, source: str, **_: Any) -> Any:
        return SimpleNamespace(run=lambda *args, **kwargs: self._launch(name, args))

    def wait(self, names: dict[str, Any]) -> None:
        """There is nothing to wait for."""


class _Overlaid:
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any):
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Anything:
    """Has every attribute, takes every call, is a context manager, and does nothing: CUDA's devices and streams."""

    def __getattr__(self, name: str) -> "_Anything":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Anything":
        return self

    def __enter__(self) -> "_Anything":
        return self

    def __exit__(self, *_: object) -> None:
        return None


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _device(*args: Any, **kwargs: Any) -> torch.device:
    return CPU


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return aten.empty_strided.default(list(size), list(stride), dtype=dtype, device=CPU)


def _empty_strided_on_host(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def _reinterpret(t: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return aten.as_strided.default(t, list(size), list(stride), t.storage_offset() + offset)
