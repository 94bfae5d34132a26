"""A trial's life hangs on its maker's. No torch here, so that it can be said before the slow imports."""

import ctypes
import sys

PR_SET_PDEATHSIG, SIGKILL = 1, 9
"""linux/prctl.h."""


def die_with_parent() -> None:
    """A trial must not outlive the one who reads its result, holding the GPU. On Linux; elsewhere nothing happens.

    The parent is the thread that made this process: it has to live as long as its trials.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
