"""The ``trainfit`` command: its verbs, and the exit code of every error.

Exit codes: 0 done; 2 wrong usage; 65 bad recipe, config or data; 70 a bug in trainfit; 74 I/O, such as a full
disk; 75 stopped early, can be resumed; 130 and 143 ended by Ctrl-C or SIGTERM, with nothing to resume.
Free of torch: a verb imports what it needs when it runs.
"""

import io
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, TextIO

import typer

import trainfit
from trainfit.cli import options
from trainfit.cli.resumable import saved_by
from trainfit.cli.text import welcome
from trainfit.spec.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_IO, InputError
from trainfit.spec.files import circle, one_line, storage_failure, writing
from trainfit.spec.printable import STANDARD_OUTPUT, printable, say
from trainfit.spec.stop import Stopped, StopSignal
from trainfit.virtual.quiet_imports import LOGGERS

EXIT_USAGE, EXIT_BUG = 2, 70
COMPLETION = "_TRAINFIT_COMPLETE"
"""Environment variable by which a shell asks typer for the names that complete a line."""

UsageError = typer.BadParameter.__bases__[0]
"""Wrong usage, as typer raises it: its own class or click's, by version."""

VERBS = (
    "predict", "plan", "trace", "explain", "import_", "measure", "calibrate", "verify", "train", "evaluate",
    "export", "sweep", "bench", "records.report", "calculators.mfu", "calculators.communication",
    "calculators.ultrascale", "serve", "serve:export_page", "catalog:gpus", "catalog:models", "records",
)  # fmt: skip
"""Commands, in the order of ``--help``: a module with a function ``run``, another function, or a group.

A module's ``OPTIONS`` are arguments of typer's ``command``. A trailing ``_`` is not part of the verb.
"""


def verb_name(verb: str) -> str:
    """Return the word that a user writes for an entry of VERBS, ``[ROOM.]MODULE[:FUNCTION]``."""
    return re.split("[.:]", verb)[-1].rstrip("_").replace("_", "-")


ABOUT = "Will this training run fit, how fast will it go, what will it cost? Answered before a GPU is rented."


def app() -> typer.Typer:
    """Return the command line with every verb."""
    verbs = typer.Typer(
        help=ABOUT, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip
    version_option = typer.Option(False, "--version", help="Print the version.")
    verbose_option = typer.Option(
        False, "--verbose", "-v",
        help="With --version: also check the private names of other libraries that trainfit relies on.",
    )  # fmt: skip

    @verbs.callback(invoke_without_command=True)
    def root(context: typer.Context, version: bool = version_option, verbose: bool = verbose_option) -> None:
        if version:
            raise typer.Exit(_version(verbose))
        if verbose:
            raise typer.BadParameter("-v stands with --version here; of a command it stands after it")
        if context.invoked_subcommand is None:
            raise UsageError("Missing command.", context)

    for verb in VERBS:
        path, _, function = verb.partition(":")
        module = import_module(f"trainfit.cli.{path}")
        if hasattr(module, "GROUP"):
            verbs.add_typer(module.GROUP, name=verb_name(verb))
        else:
            options = getattr(module, "OPTIONS", {})
            verbs.command(verb_name(verb), **options)(getattr(module, function or "run"))
    return verbs


def _version(verbose: bool) -> int:
    """Print the version, and where wanted the state of the libraries; return the exit code."""
    say(f"trainfit {trainfit.__version__}")
    if not verbose:
        return 0
    from trainfit.virtual import torch_internals

    about, changed = torch_internals.state()
    for line in (*about, *(f"  {line}" for line in changed)):
        say(line)
    return EXIT_BAD_INPUT if changed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own) and return its exit code."""
    if not has_streams():
        return EXIT_IO
    words = list(sys.argv[1:] if arguments is None else arguments)
    for name in LOGGERS:  # A user's script may import torchao, too.
        logging.getLogger(name).setLevel(logging.ERROR)
    # Keep transformers' notes on a config from preceding the one line of an error.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # A terminal without "·" shows a question mark.
    with plain_messages():
        return guarded(lambda: _run(words), saved_by(words))


def _run(words: list[str]) -> object:
    for word in words:
        try:
            os.fsencode(word)
        except UnicodeEncodeError:
            raise InputError("not Unicode text (a lone surrogate)", "correct it", value=word) from None
        if "\0" in word:
            raise InputError("has a NUL character in it", "remove it", value=word)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if not words and COMPLETION not in os.environ:
        return welcome.show()
    if words and (answer := answer_verb(words[0])) is not None:
        raise UsageError(answer)
    try:
        code = app()(words, standalone_mode=False, prog_name="trainfit", obj=words)
        if code == EXIT_INTERRUPTED:  # What some versions of typer return in place of Ctrl-C's exception.
            raise KeyboardInterrupt
        return code
    except InputError as error:
        option = options.option_of(error.field, words)
        if error.file != "--set" or option is None:
            raise
        error.file = ""
        raise error.in_file(option) from error.__cause__


def guarded(run: Callable[[], object], saved: str = "") -> int:
    """Return the exit code of ``run``; print every exception as one line.

    Args:
        saved: what is saved, and how to continue, where a signal ends it before it can say so itself.
    """
    try:
        with StopSignal(raises=True, signals=(signal.SIGTERM,)) as stop:
            try:
                code = run()
                with writing(STANDARD_OUTPUT):
                    sys.stdout.flush()
            except Exception:
                if stop.name is not None:  # A library replaced the exception.
                    raise Stopped(stop.name) from None
                raise
    except InputError as error:
        return _report(str(error), EXIT_BAD_INPUT)
    except Stopped as stopped:
        ended = Stopped(stopped.name, stopped.saved or saved)
        return _report(str(ended), ended.exit_code, kind="")
    except OSError as error:
        refused = circle(error)
        if refused is not None:
            return _report(str(refused), EXIT_BAD_INPUT)
        return _report_storage(error)
    except SystemExit as error:
        # rich and click exit with 1 when the reader of a pipe has gone; 1 is "does not fit" with --check.
        if isinstance(error.__context__, BrokenPipeError):
            return _report_storage(error.__context__)
        raise
    except (KeyboardInterrupt, typer.Abort):
        if saved:
            ended = Stopped("SIGINT", saved)
            return _report(str(ended), ended.exit_code, kind="")
        return _report("interrupted", EXIT_INTERRUPTED)
    except Exception as error:
        if isinstance(error, UsageError):
            return _report_usage(error)
        failure = storage_failure(error)
        return _report_bug(error) if failure is None else _report_storage(failure)
    return code if isinstance(code, int) else 0


def _report(line: str, code: int, *, kind: str = "error: ") -> int:
    for stream in (sys.stdout, sys.stderr):
        flush_or_drop(stream)
    try:
        say(printable(f"trainfit: {kind}{' '.join(line.split())}"), err=True)
    except OSError:  # Standard error is closed or full: the exit code remains.
        flush_or_drop(sys.stderr)
    return code


def _report_storage(error: OSError) -> int:
    """Print the file and what failed, or nothing if the reader of a pipe (such as ``| head``) has gone."""
    flush_or_drop(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return EXIT_IO
    return _report(one_line(error), EXIT_IO)


def _report_usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "trainfit"
    message = getattr(error, "format_message", error.__str__)()
    message = message.replace(": Value error, ", ": ")  # Of pydantic, by which typer checks values.
    option = getattr(error, "option_name", None)
    if option and message.startswith("No such option"):
        here = options.answer(option, getattr(error, "possibilities", None) or ())
        message = f"No such option: {option}" + (f"; {here}" if here else "")
    end = " See" if message.endswith("?") else "; see"
    return _report(f"{message.rstrip('.')}{end} {command} --help", EXIT_USAGE)


def answer_verb(word: str) -> str | None:
    """Return the answer to a first word that is another tool's verb, or a recipe; None: another word."""
    if word.startswith("-") or word in map(verb_name, VERBS):
        return None
    from trainfit.spec.parsing.synonyms import verb_here

    if (verb := verb_here(word)) is not None:
        return f"No such command {word!r}; here it is trainfit {verb}"
    from trainfit.api.recipes import is_known

    return f"No such command {word!r}; write trainfit predict {word}" if is_known(word) else None


def _report_bug(error: Exception) -> int:
    import traceback

    from trainfit.virtual import torch_internals

    if line := torch_internals.explain(error):
        return _report(line, EXIT_BAD_INPUT)

    with suppress(OSError):  # Standard error may be closed too.
        say("".join(traceback.format_exception(error)), err=True, end="")
    return _report(
        f"a bug in trainfit ({type(error).__name__}); please report it with the lines above", EXIT_BUG
    )


def flush_or_drop(stream: TextIO) -> bool:
    """Flush a standard stream; if that fails, redirect it to the null device and return False."""
    try:
        stream.flush()
    except OSError:
        with suppress(OSError):  # No file descriptor, as under pytest.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True


def has_streams() -> bool:
    """Return whether standard output is open; occupy closed descriptors, or files would get their numbers."""
    closed = [stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)]
    if not any(closed):
        return True
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stderr", "stdout"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the whole process
    if closed[1]:
        say("trainfit: error: standard output is closed; open it, or send it to a file", err=True)
    return not closed[1]


@contextmanager
def plain_messages() -> Iterator[None]:
    """Escape control characters in warnings and log messages, which quote names from configs."""
    made, formatted = logging.getLogRecordFactory(), warnings.formatwarning

    def record(*arguments: Any, **options: Any) -> logging.LogRecord:
        one = made(*arguments, **options)
        try:
            one.msg, one.args = printable(one.getMessage(), lines=True), ()
        except (TypeError, ValueError):  # The handler reports messages that do not fit their arguments.
            one.msg = printable(str(one.msg), lines=True)
        return one

    def warning(*arguments: Any, **options: Any) -> str:
        return printable(formatted(*arguments, **options), lines=True)

    logging.setLogRecordFactory(record)
    warnings.formatwarning = warning
    try:
        yield
    finally:
        logging.setLogRecordFactory(made)
        warnings.formatwarning = formatted
