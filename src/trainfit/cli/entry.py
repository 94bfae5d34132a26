"""The first lines of the ``trainfit`` command: it listens to SIGTERM before anything slow is imported."""

import signal
import sys

from trainfit.spec.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from trainfit.training.stop import Stopped, StopSignal


def main() -> int:
    """Run the command line of this process and return its exit code.

    SIGTERM ends a command with exit code 75 and one line that says what is saved; a verb that has something to save
    takes over once it has.
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
