"""Find this machine's GPU in a separate process.

This one must not create a CUDA context before a measurement.
"""

import json
import subprocess
import sys

from trainfit.catalog.load import gpu, gpu_of_device
from trainfit.catalog.names import CPU
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu

ASK = """
import json, torch
print(json.dumps(torch.cuda.get_device_name() if torch.cuda.is_available() else None))
"""
LIMIT_S = 120.0


def device_name() -> str | None:
    """Return the driver's name of this machine's first CUDA GPU; None without one.

    Raises:
        RuntimeError: torch failed.
    """
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise RuntimeError(f"torch could not name its GPU: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def gpu_here(name: str | None = None) -> tuple[Gpu, str]:
    """The catalog's row of this machine's GPU (or CPU), and what the device calls itself.

    Args:
        name: the row's name, where the driver's name does not tell.
    Raises:
        InputError: the catalog has no such GPU; the error lists near names.
    """
    known = device_name()
    if known is None and name not in (None, CPU):
        raise InputError(
            "no CUDA GPU in this machine", "leave --gpu out to verify the CPU path", field="gpu", value=name
        )
    if known is None or name == CPU:
        row = gpu(CPU)
        return row, row.title
    return gpu(name) if name is not None else gpu_of_device(known), known
