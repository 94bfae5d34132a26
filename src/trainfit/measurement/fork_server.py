"""Import once what trials need, and start each as a fork of this process."""

import os
from collections.abc import Callable
from functools import cache

from trainfit.measurement.process import forked, spawned
from trainfit.measurement.trial import import_for_steps
from trainfit.models.deferred_torchao import defer_torchao
from trainfit.spec.printable import say


@cache
def ready_to_fork(device: str) -> Callable[..., int]:
    """Import what trials need; return ``forked`` if a fork can use the device, else ``spawned``.

    Args:
        device: ``cpu``; any other may be CUDA.
    """
    # Importing, and counting GPUs, leaves CUDA untouched.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    defer_torchao()
    import_for_steps()  # Once for all forks, which otherwise take seconds each.
    can_fork = not torch.cuda.is_initialized() and (device == "cpu" or _fork_can_use_cuda())
    return forked if can_fork else spawned


def _fork_can_use_cuda() -> bool:
    """Return whether a fork can create a CUDA context, or torch has no CUDA at all."""
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
