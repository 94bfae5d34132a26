"""Bounds of this machine: how many processes it can take, and how many GPUs it shows. No torch here."""

import os
import sys

from trainfit.measurement.nvml import visible_gpus
from trainfit.spec.errors import InputError
from trainfit.spec.host_memory import available_bytes
from trainfit.spec.units import format_bytes

PROCESS_BYTES = 3 * 2**27
"""Memory of a process that has imported torch: 0.37 GiB."""
LEAST_PROCESSES = 8
"""Processes allowed on a machine with few cores, where they take turns."""
PER_CORE = 2


def num_cores() -> int:
    """Return the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def most_processes() -> int:
    """Return how many processes of this package can run at once, by the machine's cores and free memory."""
    by_memory = max(1, available_bytes() // PROCESS_BYTES)
    return min(max(LEAST_PROCESSES, PER_CORE * num_cores()), by_memory)


def check_processes(count: int, field: str) -> None:
    """Refuse a number of processes that this machine cannot take.

    Raises:
        InputError: too many processes; it names ``field``, which gave the number.
    """
    most = most_processes()
    if count > most:
        here = f"{num_cores()} cores and {format_bytes(available_bytes())} of free memory"
        raise InputError(
            f"this machine has {here}", f"use at most {most}", field=field, value=count
        )  # fmt: skip


def check_ranks(count: int, device: str, field: str) -> None:
    """Refuse more ranks than ``device`` has GPUs, or, on a CPU, than the machine can take.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        InputError: too many ranks; it names ``field``, which gave the number.
    """
    num_gpus = 0 if device == "cpu" else len(visible_gpus())
    if num_gpus and count > num_gpus:
        remedy = f"use at most {num_gpus}, or torchrun on several hosts"
        problem = f"this machine shows {num_gpus} GPU{'s' * (num_gpus > 1)}"
        raise InputError(problem, remedy, field=field, value=count)
    if not num_gpus:
        check_processes(count, field)
