"""End a trial's process when its parent dies. No torch here, so that it can run before the slow imports."""

import ctypes
import sys

PR_SET_PDEATHSIG, SIGKILL = 1, 9
"""linux/prctl.h."""


def die_with_parent() -> None:
    """End this process when its parent dies, so that no trial keeps the GPU. It does nothing outside Linux.

    The parent is the thread that started this process: it must live as long as its trials.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
