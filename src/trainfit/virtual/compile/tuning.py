"""Scratch of autotuning Inductor's kernels at their first launch, with empty caches on disk.

Each configuration is benchmarked with a buffer of the L2 cache's size to flush it and clones of the arguments
that it changes (``CachingAutotuner.bench`` and ``copy_args_to_cpu_if_needed`` in
``torch/_inductor/runtime/triton_heuristics.py``, ``InductorBenchmarker`` in ``benchmarking.py``).
"""

import ast
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import groupby
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from trainfit.ledger.ledger import ALLOCATE, Ledger
from trainfit.ledger.segments import MIN_BLOCK
from trainfit.virtual.trace.exclusive import replaced


class Kernel(NamedTuple):
    """Properties of a Triton kernel's source that determine its autotuning."""

    num_configs: int
    changed: tuple[int, ...]
    """Positions of the arguments that a launch changes, which are cloned."""
    spares_memory: bool
    """Clones that would raise the peak are in host memory (backward programs)."""


class Tuning:
    """Autotuning of the kernels of all programs, once per kernel."""

    def __init__(self, l2_cache_bytes: int):
        self._l2_cache_bytes = l2_cache_bytes
        self._launched: set[str] = set()

    def scratch(self, source: str, args: Sequence[Any], ledger: Ledger) -> list[tuple[int, ...]]:
        """Return tuples of bytes, each allocated and freed together, before the kernel's first launch.

        Args:
            source: as Inductor passes it to the compiler.
            ledger: the run so far; its last segment is the current phase.
        """
        if source in self._launched:
            return []
        self._launched.add(source)
        kernel = read(source)
        if kernel.num_configs < 2:
            return []
        clones: tuple[int, ...] = ()
        budget = headroom(ledger) if kernel.spares_memory else 0
        for t in (args[index] for index in kernel.changed):
            num_bytes = _extent(t, 0)
            if not kernel.spares_memory or num_bytes <= budget:
                budget -= num_bytes
                clones += (_extent(t, int(t.storage_offset())),)
        # The warm-up runs before the buffer is allocated.
        return [clones, (self._l2_cache_bytes, *clones)]


def headroom(ledger: Ledger) -> int:
    """Return the current phase's peak minus the bytes allocated now, in the whole model."""
    allocated = highest = 0
    segment = len(ledger.segments) - 1
    events = (event for event in ledger.events if event.segment == segment)
    for group, run in groupby(events, key=lambda event: event.group):
        before, peak = allocated, allocated
        for event in run:
            num_bytes = -(-ledger.storages[event.storage].num_bytes // MIN_BLOCK) * MIN_BLOCK
            allocated += num_bytes if event.kind == ALLOCATE else -num_bytes
            peak = max(peak, allocated)
        # Of the copies of a middle group the first or the last has the highest peak.
        copies = (ledger.times_of_group(group) - 1 if ledger.repeats else 0) * (allocated - before)
        highest = max(highest, peak, peak + copies)
        allocated += copies
    return highest - allocated


def read(source: str) -> Kernel:
    """Evaluate the ``triton_heuristics`` decorator in a kernel's source."""
    from torch._inductor.runtime import hints, triton_heuristics

    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    function = next(f for f in functions if any(_is_heuristic(d) for d in f.decorator_list))
    decorator = next(d for d in function.decorator_list if _is_heuristic(d))

    def kernel(
        size_hints: Any, configs: list[Any], triton_meta: Any, heuristic_type: Any, filename: Any = None,
        inductor_meta: Any = None, **_: Any,
    ) -> Kernel:  # fmt: skip
        names = [argument.arg for argument in function.args.args]
        changed = inductor_meta.get("mutated_arg_names", ())
        return Kernel(
            num_configs=len(triton_heuristics.unique_configs(configs)),
            changed=tuple(index for index, name in enumerate(names) if name in changed),
            spares_memory=inductor_meta.get("optimize_mem", True),
        )

    # Without Triton the source uses AttrsDescriptor(...), and there is no Config.
    known = {
        **vars(hints), "AttrsDescriptor": dict, "triton_heuristics": triton_heuristics, "torch": torch,
        "__file__": "",
    }  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(replaced(triton_heuristics, "cached_autotune", kernel))
        stack.enter_context(replaced(triton_heuristics, "triton", SimpleNamespace(Config=_Config)))
        for name in ("Config", "InductorConfig"):
            stack.enter_context(replaced(triton_heuristics, name, _Config))
        return eval(compile(ast.Expression(decorator), "<inductor kernel>", "eval"), known)


class _Config:
    """Substitute of ``triton.Config`` that the heuristics create and compare."""

    def __init__(
        self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, **settings: Any
    ) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages
        vars(self).update(settings)


def _is_heuristic(decorator: ast.expr) -> bool:
    return (
        isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Attribute)
        and isinstance(decorator.func.value, ast.Name)
        and decorator.func.value.id == "triton_heuristics"
    )


def _extent(t: torch.Tensor, offset: int) -> int:
    """Return the bytes from ``offset`` elements before the first to the last (``clone_preserve_strides``)."""
    if t.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return (offset + last + 1) * t.element_size()
