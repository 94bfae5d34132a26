"""A user's training script as a callable, which the virtual GPU runs."""

import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from trainfit.cli.trace.launch import Launch
from trainfit.spec.errors import InputError
from trainfit.spec.printable import say

LEAVE_OUT = "leave it out, or trace a version of the script without it"
CORRECT = "correct the script, unless it fails for lack of values: those on the device read as 0"


def callable_of(launch: Launch) -> Callable[[], None]:
    """Return a callable that runs a script as its command line does."""

    def train() -> None:
        _run_script(launch)

    train.script = launch.file  # pyright: ignore[reportFunctionMemberAccess]
    train.__qualname__ = launch.target if launch.is_module else Path(launch.target).name
    return train


def _run_script(launch: Launch) -> None:
    """Run the file or module as Python does, with its folder first on the path and its own ``sys.argv``.

    Raises:
        InputError: the script raised an exception, whose traceback is printed on standard error.
    """
    from trainfit.user.lacking import lack_of, line_of

    folder = Path.cwd() if launch.is_module else Path(launch.target).resolve().parent
    kept = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [launch.target, *launch.arguments], [str(folder)]
    os.environ.update(launch.environment)  # Restored after the trace.
    try:
        if launch.is_module:
            runpy.run_module(launch.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(launch.target, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            problem = f"the script ended with exit code {error.code}"
            raise InputError(problem, "correct it, or its arguments", file=launch.target) from None
    except InputError as error:
        raise error.in_file(line_of(error) or launch.target) from error.__cause__
    except Exception as error:
        say("".join(traceback.format_exception(error)), err=True, end="")
        lack, file = lack_of(error), line_of(error) or launch.target
        if lack is not None:
            raise InputError(lack, LEAVE_OUT, file=file) from None
        raise InputError(f"{type(error).__name__}: {error}", CORRECT, file=file) from None
    finally:
        sys.argv, sys.path[:] = kept
