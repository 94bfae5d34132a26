"""Bounds of this machine: how many processes it can take, and how much memory is free. No torch here."""

import os
import re
import sys
from pathlib import Path

from trainfit.measurement.environment import host_bytes
from trainfit.measurement.nvml import visible_gpus
from trainfit.spec.errors import InputError
from trainfit.spec.units import format_bytes

PROCESS_BYTES = 3 * 2**27
"""Memory of a process that has imported torch: 0.37 GiB."""
LEAST_PROCESSES = 8
"""Processes allowed on a machine with few cores, where they take turns."""
PER_CORE = 2


def num_cores() -> int:
    """Return the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def available_bytes() -> int:
    """Return the host's memory that processes can still take without swapping."""
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s*(\d+) kB", meminfo.read_text()) if meminfo.is_file() else None
    free = 1024 * int(found.group(1)) if found else host_bytes()
    used = Path("/sys/fs/cgroup/memory.current")
    if used.is_file():
        free = min(free, host_bytes() - int(used.read_text()) + _reclaimable_bytes())
    return max(0, free)


def _reclaimable_bytes() -> int:
    """Return the file pages that the control group counts as used and gives back when memory is short."""
    stat = Path("/sys/fs/cgroup/memory.stat")
    pairs = dict(line.split() for line in stat.read_text().splitlines()) if stat.is_file() else {}
    return int(pairs.get("inactive_file", 0)) + int(pairs.get("active_file", 0))


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
