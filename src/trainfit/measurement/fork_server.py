"""Import the modules of trials once, and start each trial as a fork of this process."""

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

from trainfit.measurement.process import forked, spawned
from trainfit.measurement.trial import import_for_steps
from trainfit.spec.printable import say
from trainfit.virtual.forked import autograd_has_threads
from trainfit.virtual.quiet_imports import quiet_imports

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Empty while modules are imported. Importing transformers imports torchao, which asks a GPU that it sees for
its compute capability; that initialises CUDA, after which no fork of this process could use it."""
SEES_GPU_ONCE = "bitsandbytes"
"""A library that must not be imported here: it registers its CUDA kernels only if it sees a GPU, and then
initialises it. It also imports Inductor, which chooses how to benchmark kernels by whether it sees a GPU."""


def ready_to_fork(device: str) -> Callable[..., int]:
    """Import the modules of trials; return ``forked`` if a fork can train on the device, else ``spawned``.

    Args:
        device: ``cpu``; any other may be CUDA.
    """
    _import()
    import torch

    unusable = device != "cpu" and SEES_GPU_ONCE in sys.modules
    if unusable or torch.cuda.is_initialized() or autograd_has_threads():
        return spawned
    return forked if device == "cpu" or _fork_can_use_cuda() else spawned


@cache
def _import() -> None:
    """Import the modules of trials, once for all forks, which otherwise take seconds each."""
    # Importing, and counting GPUs, leaves CUDA untouched.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    visible = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = ""
    try:
        with quiet_imports():
            import_for_steps(adapters=find_spec(SEES_GPU_ONCE) is None)
    finally:
        _forget_missing_gpu()
        os.environ.pop(VISIBLE)
        if visible is not None:
            os.environ[VISIBLE] = visible


def _forget_missing_gpu() -> None:
    """Clear torch's cached queries about Triton, which imports made while no GPU was visible."""
    from torch.utils import _triton

    for answer in vars(_triton).values():
        if hasattr(answer, "cache_clear"):
            answer.cache_clear()


@cache
def _fork_can_use_cuda() -> bool:
    """Return whether a fork of this process can use the GPU, by trying it in one.

    True as well where there is nothing to try: torch has neither CUDA nor ROCm, or the fork sees no GPU.
    Where CUDA refuses, the reason is printed to stderr.
    """
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return True
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if torch.cuda.is_available():
                torch.zeros(1, device="cuda")
            code = 0
        except RuntimeError as error:
            say(f"CUDA does not work in a fork of this process: {error}", err=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
