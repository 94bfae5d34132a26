"""``gpu: cpu``: the machine that runs the command, as a device to predict for. Imports no torch."""

import os
import platform

from trainfit.catalog.names import CPU
from trainfit.spec.hardware import Gpu, Source


def this_cpu() -> Gpu:
    """Return this machine's CPU. Its memory is known, its peak and bandwidth are not."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Gpu(
        name=CPU,
        title=f"this machine's CPU ({platform.machine()}, {os.cpu_count()} cores)",
        vendor="host",
        architecture=platform.machine(),
        memory_bytes=memory_bytes,
        usable_bytes=memory_bytes,
        memory_bytes_per_s=None,
        peak_flops_per_s={},
        link="none",
        host_link="none",
        gpus_per_host=1,
        source=Source(url="", accessed="now", note="read from the operating system"),
    )
