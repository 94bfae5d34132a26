"""What may be done in a process that was started for one command. No torch here."""

import threading

is_own_process = False
"""Whether the process was started for one command."""
_main = threading.main_thread()


def has_threads() -> bool:
    """Return whether other threads run than tqdm's, a daemon that wakes every ten seconds."""
    return any(each.name != "tqdm_monitor" for each in threading.enumerate() if each is not _main)
