"""Run Inductor's program, a Python module, on the virtual GPU.

Its imports are substituted: a buffer is a fake tensor, a Triton kernel an entry in the ledger, and other
operations run on fake tensors under the tracer.
"""

import builtins
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import torch

from trainfit.ledger.ledger import FIRST, LAST, slice_path
from trainfit.virtual.compile.generate import AT, Kernel, Source
from trainfit.virtual.compile.graph_masks import GraphMasks
from trainfit.virtual.compile.tuning import Tuning
from trainfit.virtual.trace.scope import NO_SCOPE, Scope, ScopeTracker
from trainfit.virtual.trace.tracer import Tracer

aten = torch.ops.aten
CPU = torch.device("cpu")


class Program:
    """A callable that takes a list of inputs, which it empties, and returns the outputs."""

    def __init__(
        self,
        source: Source,
        tracer: Tracer,
        scopes: ScopeTracker,
        tuning: Tuning | None,
        copies: Collection[tuple[int, ...]] = (),
    ):
        self._source = source
        self._copies = copies
        """Sizes of buffers that another run may not allocate."""
        self.kernels: tuple[Kernel, ...] = ()
        """Set when the program first runs."""
        self._tracer, self._scopes, self._tuning = tracer, scopes, tuning
        self._kernel = Kernel(0, (), False)
        self._base = NO_SCOPE
        self._masks = GraphMasks(source.graph, tracer.masks) if source.graph is not None else None
        self._call: Callable[[list[Any]], Any] | None = None

    def __call__(self, inputs: list[Any]) -> Any:
        if self._call is None:
            self._call = self._load()
        self._base = self._scopes.override = self._scopes.current()
        self._tracer.entered_graph()
        if self._masks is not None:
            self._masks.enter(inputs)
        try:
            outputs = self._call(inputs)
        finally:
            self._scopes.override = None
            self._tracer.visible_share = None
        if self._masks is not None:
            self._masks.leave(outputs)
        return outputs

    def _load(self) -> Callable[[list[Any]], Any]:
        text, self.kernels = self._source.written()
        names: dict[str, Any] = {
            "__name__": "inductor_program",
            "__builtins__": {**vars(builtins), "__import__": self._import},
        }
        exec(compile(text, "<inductor program>", "exec"), names)
        names.update(self._source.constants)
        ops = _Overlaid(torch.ops, higher_order=RANDOM_OPS)
        names |= {
            "torch": _Overlaid(torch, cuda=_Stub(), device=lambda *_, **__: CPU, ops=ops),
            "device": lambda *_, **__: CPU,
            "empty_strided_cuda": self._allocate,
            "empty_strided_cpu": _empty_strided_on_host if self._tracer.gpu else _empty_strided,
            "reinterpret_tensor": _reinterpret,
            **dict.fromkeys(("assert_size_stride", "assert_alignment", "get_raw_stream"), _nothing),
            AT: self._begin_kernel,
        }
        return names["call"]

    def _allocate(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        buffer = _empty_strided(size, stride, dtype)
        if tuple(size) in self._copies:
            self._tracer.live.ledger.optional.append(self._tracer.live.index_of(buffer))
        return buffer

    def _import(self, name: str, outer: Any = None, local: Any = None, wanted: Any = (), level: int = 0):
        if name.partition(".")[0] == "triton":
            return _Stub()
        if name == "torch._inductor.async_compile":
            return SimpleNamespace(AsyncCompile=lambda: _Kernels(self._launch))
        found = builtins.__import__(name, outer, local, wanted, level)
        # Names that a CPU build lacks are replaced by _load.
        return _Overlaid(found, **{key: _nothing for key in wanted or () if not hasattr(found, key)})

    def _begin_kernel(self, index: int) -> None:
        self._kernel = self.kernels[index]
        self._tracer.visible_share = (
            self._masks.visible_share(self._kernel.node) if self._masks is not None else None
        )
        self._scopes.override = self._scope(self._kernel)

    def _scope(self, kernel: Kernel) -> Scope:
        """Return the scope of the program's layer and of the last module that a fused kernel belongs to."""
        within = f".{kernel.modules[-1]}" if kernel.modules else ""
        path, group = (self._base.path + within).removeprefix("."), self._base.group
        if kernel.position is not None:
            part = kernel.position.part
            path = slice_path(*kernel.position)
            group = part if FIRST <= part <= LAST else group
        return self._base._replace(
            module=(self._base.module + within).removeprefix("."), path=path, group=group,
            recomputing=self._base.recomputing or kernel.recomputes,
        )  # fmt: skip

    def _launch(self, name: str, source: str, args: tuple[Any, ...]) -> None:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.int64)
        self._tracer.launched(name, self._kernel.num_bytes, str(dtype).removeprefix("torch."))
        if self._tuning is not None:
            self._tracer.tuned(self._tuning.scratch(source, args, self._tracer.ledger))
        # The bytes of a second kernel of the same scheduled node are counted already.
        self._kernel = self._kernel._replace(num_bytes=0)


class _Kernels:
    """Replaces Inductor's ``AsyncCompile``: launches are recorded (Triton for CUDA, C++ for CPU)."""

    def __init__(self, launch: Callable[[str, str, tuple[Any, ...]], None]):
        self._launch = launch

    def triton(self, name: str, source: str, **_: Any) -> Any:
        return SimpleNamespace(run=lambda *args, **kwargs: self._launch(name, source, args))

    def cpp_pybinding(self, arguments: list[str], source: str, **_: Any) -> Any:
        return lambda *args: self._launch("cpp_fused", source, args)

    def wait(self, names: dict[str, Any]) -> None:
        """Do nothing."""


RANDOM_OPS = SimpleNamespace(
    run_and_save_rng_state=lambda op, *args, **kwargs: (
        torch.empty(0, dtype=torch.uint8, device="cpu"), op(*args, **kwargs)
    ),
    run_with_rng_state=lambda state, op, *args, **kwargs: op(*args, **kwargs),
)  # fmt: skip
"""Operations that save and restore the random state, which is on the host."""


class _Overlaid:
    """A module with some attributes replaced."""

    def __init__(self, module: Any, **names: Any):
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Stub:
    """Stub of CUDA's devices and streams, with every attribute, callable and a context manager."""

    def __getattr__(self, name: str) -> "_Stub":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Stub":
        return self

    def __enter__(self) -> "_Stub":
        return self

    def __exit__(self, *_: object) -> None:
        return None


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return aten.empty_strided.default(list(size), list(stride), dtype=dtype, device=CPU)


def _empty_strided_on_host(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def _reinterpret(t: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return aten.as_strided.default(t, list(size), list(stride), t.storage_offset() + offset)
