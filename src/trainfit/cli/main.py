"""``trainfit``: the verbs, and what becomes of errors.

Enters: the command line. Leaves: an exit code. 0 done; 2 wrong usage; 65 bad recipe, config or data; 70 a bug of
ours; 74 I/O (a full disk too); 75 stopped early, can be resumed; 130 interrupted. No torch here: a verb imports what it
needs when it runs.
"""

import io
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import typer

import trainfit
from trainfit.cli import (
    bench,
    catalog,
    explain,
    measure,
    mfu,
    predict,
    records,
    report,
    sweep,
    trace,
    train,
    verify,
)
from trainfit.cli.streams import flush_or_drop, has_streams, plain_messages
from trainfit.spec.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_IO, EXIT_STOPPED, InputError
from trainfit.spec.files import circle, one_line, storage_failure, writing
from trainfit.spec.printable import STANDARD_OUTPUT, printable, say
from trainfit.spec.synonyms import field_here
from trainfit.training.stop import Stopped, StopSignal

EXIT_USAGE, EXIT_BUG = 2, 70

UsageError = typer.BadParameter.__bases__[0]
"""Wrong usage, as typer raises it (its own class or click's, by version)."""

ABOUT = "Will this training run fit, how fast will it go, what will it cost? Answered before a GPU is rented."


def app() -> typer.Typer:
    """The command line: every verb registers itself."""
    verbs = typer.Typer(
        help=ABOUT, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )

    @verbs.callback()
    def root(
        version: bool = typer.Option(
            False, "--version", help="Print the version and end.", callback=_version
        ),
    ) -> None:
        pass

    for verb in (
        predict,
        trace,
        explain,
        measure,
        verify,
        train,
        sweep,
        bench,
        report,
        records,
        mfu,
        catalog,
    ):
        verb.register(verbs)
    return verbs


FIELD = re.compile(r"[a-z_]+(\.[a-z_]+)?")
"""The dotted name of a recipe's field."""

NOISY_IMPORTS = ("torchao", "torch.utils._pytree")
"""Who warns when transformers imports torchao, which it does wherever that is installed; nothing a user could change."""


def _version(wanted: bool) -> None:
    if wanted:
        say(f"trainfit {trainfit.__version__}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code; errors are told on stderr.

    The console script is ``sys.exit(main())``.
    """
    if not has_streams():
        return EXIT_IO
    words = list(sys.argv[1:] if arguments is None else arguments)
    for name in NOISY_IMPORTS:
        logging.getLogger(name).setLevel(logging.ERROR)
    # transformers' notes on a config, such as a token id beyond the vocabulary, would stand before our one line.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # A terminal without a letter such as "·" gets a question mark.
            stream.reconfigure(errors="replace")
    with plain_messages():
        return guarded(lambda: _run(words))


def _run(words: list[str]) -> object:
    for word in words:
        try:
            os.fsencode(word)
        except UnicodeEncodeError:
            raise InputError("not Unicode text (a lone surrogate)", "correct it", value=word) from None
        if "\0" in word:
            raise InputError("has a NUL character in it", "remove it", value=word)
    return app()(words or ["--help"], standalone_mode=False, prog_name="trainfit")


def guarded(run: Callable[[], object]) -> int:
    """Return the exit code of ``run``; every exception becomes its kind's line and code."""
    try:
        with StopSignal(raises=True, signals=(signal.SIGTERM,)) as stop:
            try:
                code = run()
                with writing(STANDARD_OUTPUT):
                    sys.stdout.flush()
            except Exception:
                if stop.name is not None:  # A library made another exception of it.
                    raise Stopped(stop.name) from None
                raise
    except InputError as error:
        return _tell(str(error), EXIT_BAD_INPUT)
    except Stopped as stopped:
        return _tell(str(stopped), EXIT_STOPPED, kind="")
    except OSError as error:
        refused = circle(error)
        if refused is not None:
            return _tell(str(refused), EXIT_BAD_INPUT)
        return _tell_storage(error)
    except SystemExit as error:
        # rich and click end with 1, which is what --check means by "does not fit", where a reader has left.
        if isinstance(error.__context__, BrokenPipeError):
            return _tell_storage(error.__context__)
        raise
    except (KeyboardInterrupt, typer.Abort):
        return _tell("interrupted", EXIT_INTERRUPTED)
    except Exception as error:
        if isinstance(error, UsageError):
            return _tell_usage(error)
        failure = storage_failure(error)
        return _tell_bug(error) if failure is None else _tell_storage(failure)
    return code if isinstance(code, int) else 0


def _tell(line: str, code: int, *, kind: str = "error: ") -> int:
    for stream in (sys.stdout, sys.stderr):
        flush_or_drop(stream)
    try:
        say(printable(f"trainfit: {kind}{' '.join(line.split())}"), err=True)
    except OSError:  # Standard error is gone or full: the exit code says it.
        flush_or_drop(sys.stderr)
    return code


def _tell_storage(error: OSError) -> int:
    """The file and what failed; nothing where a reader has left (such as ``| head``): there is nobody to tell."""
    flush_or_drop(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return EXIT_IO
    return _tell(one_line(error), EXIT_IO)


def _tell_usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "trainfit"
    message = getattr(error, "format_message", error.__str__)()
    option = getattr(error, "option_name", None)
    if option and (here := field_here(option.lstrip("-"))):
        here = f"--set {here}=VALUE" if FIELD.fullmatch(here) else here
        message = f"No such option: {option}; here it is {here}"
    return _tell(f"{message.rstrip('.')}; see {command} --help", EXIT_USAGE)


def _tell_bug(error: Exception) -> int:
    import traceback

    with suppress(OSError):  # Standard error may be gone too.
        say("".join(traceback.format_exception(error)), err=True, end="")
    return _tell(f"a bug of ours ({type(error).__name__}); please report it with the lines above", EXIT_BUG)
