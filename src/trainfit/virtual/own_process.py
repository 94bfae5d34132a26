"""What may be done in a process that was started for one command. No torch here."""

import threading

from trainfit.spec.printable import PROGRESS_THREAD

is_own_process = False
"""Whether the process was started for one command."""
DAEMONS = ("tqdm_monitor", PROGRESS_THREAD)
_main = threading.main_thread()


def has_threads() -> bool:
    """Return whether other threads run than daemons that wake now and then: tqdm's, and our progress."""
    return any(each.name not in DAEMONS for each in threading.enumerate() if each is not _main)
