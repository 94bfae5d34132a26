"""What may be done in a process that was started for one command, or that has threads. No torch here."""

import threading
from contextlib import suppress
from pathlib import Path

from trainfit.spec.printable import PROGRESS_THREAD

is_own_process = False
"""Whether the process was started for one command."""
OF_AUTOGRAD = "pt_autograd"
"""What the names of autograd's threads begin with (torch/csrc/autograd/engine.cpp)."""
DAEMONS = ("tqdm_monitor", PROGRESS_THREAD)
_main = threading.main_thread()


def has_threads() -> bool:
    """Return whether other threads run than daemons that wake now and then: tqdm's, and our progress."""
    return any(each.name not in DAEMONS for each in threading.enumerate() if each is not _main)


def autograd_has_threads() -> bool:
    """Return whether autograd runs threads, for GPUs: then no fork of this process can run a backward.

    The first backward of a process starts them, one for each GPU that PyTorch sees.
    """
    for thread in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # It ended meanwhile.
            if thread.read_text().startswith(OF_AUTOGRAD):
                return True
    return False
