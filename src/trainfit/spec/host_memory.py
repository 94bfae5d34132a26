"""Memory of this machine, or of the control group this process runs in. No torch here."""

import os
import re
from pathlib import Path


def host_bytes() -> int:
    """Return the memory of this machine, or of the control group this process runs in, whichever is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


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
