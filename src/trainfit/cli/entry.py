"""Entry point of the ``trainfit`` command: handle SIGTERM before slow imports."""

import gc
import os
import signal
import sys

from trainfit.cli.resumable import saved_by
from trainfit.spec.errors import EXIT_INTERRUPTED
from trainfit.spec.stop import Stopped, StopSignal
from trainfit.virtual import forked


def main() -> int:
    """Run the command line of this process and return its exit code.

    SIGTERM ends a command with one line and exit code 143; ``train`` and ``sweep`` save first, say how to
    continue, and end with 75.
    """
    try:
        with StopSignal(raises=True, signals=(signal.SIGTERM,)):
            from trainfit.cli.main import main as run

            return run()
    except Stopped as stopped:
        ended = Stopped(stopped.name, stopped.saved or saved_by(sys.argv[1:]))
        print(f"trainfit: {ended}", file=sys.stderr)
        return ended.exit_code
    except KeyboardInterrupt:
        print("trainfit: error: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def command() -> int:
    """Run ``main`` in a process that was started for it.

    ``predict`` runs without automatic garbage collection, which would visit the objects of the imported
    libraries again and again, and once more at the end: 1.5 s of a cold prediction. A trace collects its own.
    """
    forked.allow()
    predicts = sys.argv[1:2] == ["predict"]
    if predicts:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # It needs no GPU, which imports (torchao) would initialise.
        gc.disable()
    code = main()
    if predicts:
        gc.freeze()
    return code
