"""Entry point of the ``trainfit`` command: handle SIGTERM before slow imports."""

import signal
import sys

from trainfit.spec.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from trainfit.spec.stop import Stopped, StopSignal


def main() -> int:
    """Run the command line of this process and return its exit code.

    SIGTERM ends a command with exit code 75 and one line on what is saved; ``train`` and ``sweep`` save
    first.
    """
    try:
        with StopSignal(raises=True, signals=(signal.SIGTERM,)):
            from trainfit.cli.main import main as run

            return run()
    except Stopped as stopped:
        print(f"trainfit: {stopped}", file=sys.stderr)
        return EXIT_STOPPED
    except KeyboardInterrupt:
        print("trainfit: error: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def command() -> int:
    """Run ``main`` in a process that was started for it, and end the process."""
    from trainfit.prediction import start_up
    from trainfit.virtual import own_process

    own_process.is_own_process = True
    return start_up.leave(main())
