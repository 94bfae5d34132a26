"""Find this machine's GPU in a separate process: this one must not create a CUDA context."""

import json
import subprocess
import sys

from trainfit.catalog.load import gpu, gpu_of_device
from trainfit.catalog.names import CPU
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu

PROGRAM = """
import json, torch
print(json.dumps(torch.cuda.get_device_name() if torch.cuda.is_available() else None))
"""
LIMIT_S = 120.0


def device_name() -> str | None:
    """Return the driver's name of this machine's first CUDA GPU; None without one.

    Raises:
        RuntimeError: torch failed.
    """
    command, closed = [sys.executable, "-c", PROGRAM], subprocess.DEVNULL
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, stdin=closed)
    if done.returncode:
        raise RuntimeError(f"torch could not name its GPU: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def gpu_here(name: str | None = None) -> tuple[Gpu, str]:
    """Return the catalog's row of this machine's GPU (or CPU), and the device's own name.

    Args:
        name: the row's name, if the driver's name does not identify it.

    Raises:
        InputError: the catalog has no such GPU; the error lists near names.
    """
    known = device_name()
    if known is None and name not in (None, CPU):
        problem, remedy = "no CUDA GPU in this machine", "leave --gpu out to verify the CPU path"
        raise InputError(problem, remedy, field="gpu", value=name)
    if known is None or name == CPU:
        row = gpu(CPU)
        return row, row.title
    return gpu(name) if name is not None else gpu_of_device(known), known
