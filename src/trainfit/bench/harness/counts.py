"""Count the bytes that a run's operations move and the kernels that it launches."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainfit.bench.harness.profiling import num_on_gpu, profiler


class MovedBytes(TorchDispatchMode):
    """Add up what each operation reads and writes: each tensor once; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            self.num_bytes += sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        return out


def moved_bytes(run: Callable[[], object]) -> int:
    """Return the bytes that the PyTorch operations of ``run`` read and write; other kernels are not seen."""
    with MovedBytes() as moved:
        run()
    return moved.num_bytes


def compiled_bytes(first_run: Callable[[], object]) -> int:
    """Return the bytes that the kernels compiled by ``first_run`` read and write, as Inductor counts them.

    Inductor counts only where its log of metrics is on, and compiles only what is in no cache.

    Raises:
        RuntimeError: nothing was compiled.
    """
    from torch._inductor import compile_fx, config, metrics

    log = compile_fx.inductor_metrics_log
    before, level = metrics.num_bytes_accessed, log.level
    log.setLevel(logging.INFO)
    try:
        with config.patch(fx_graph_cache=False):
            first_run()
    finally:
        log.setLevel(level)
    counted = metrics.num_bytes_accessed - before
    if counted == 0:
        raise RuntimeError("the compiler counted no bytes: nothing was compiled anew")
    return counted


def launches(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the kernels and copies that ``run`` starts on a GPU; None where the profiler sees none."""
    if device.type != "cuda":
        return None
    run()
    torch.cuda.synchronize(device)
    with profiler(device) as profile:
        run()
        torch.cuda.synchronize(device)
    return num_on_gpu(profile.events() or ()) or None
