"""``trainfit``: the verbs, and what becomes of errors.

Enters: the command line. Leaves: an exit code. 0 done; 2 wrong usage; 65 bad recipe, config or data; 70 a bug of
ours; 74 I/O; 75 stopped early, can be resumed; 130 interrupted. No torch here: a verb imports what it needs when it runs.
"""

import io
import logging
import os
import sys
from collections.abc import Callable, Sequence

import typer

import trainfit
from trainfit.cli import bench, catalog, explain, measure, mfu, predict, records, report, sweep, train, verify
from trainfit.spec.errors import EXIT_BAD_INPUT, InputError
from trainfit.spec.files import circle

EXIT_USAGE, EXIT_BUG, EXIT_IO, EXIT_INTERRUPTED = 2, 70, 74, 130

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

    for verb in (predict, explain, measure, verify, train, sweep, bench, report, records, mfu, catalog):
        verb.register(verbs)
    return verbs


NOISY_IMPORTS = ("torchao", "torch.utils._pytree")
"""Who warns when transformers imports torchao, which it does wherever that is installed; nothing a user could change."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trainfit {trainfit.__version__}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code; errors are told on stderr.

    The console script is ``sys.exit(main())``.
    """
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
    """``run``'s exit code, with every exception told in the way its kind deserves."""
    try:
        code = run()
        sys.stdout.flush()
    except InputError as error:
        return _tell(str(error), EXIT_BAD_INPUT)
    except BrokenPipeError:  # The reader has left (such as `| head`): there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_IO
    except OSError as error:
        refused = circle(error)
        if refused is not None:
            return _tell(str(refused), EXIT_BAD_INPUT)
        where = f"{error.filename}: " if error.filename else ""
        return _tell(f"{where}{error.strerror or error}", EXIT_IO)
    except (KeyboardInterrupt, typer.Abort):
        return _tell("interrupted", EXIT_INTERRUPTED)
    except Exception as error:
        if isinstance(error, UsageError):
            return _tell_usage(error)
        return _tell_bug(error)
    return code if isinstance(code, int) else 0


def _tell(line: str, code: int) -> int:
    print(f"trainfit: error: {' '.join(line.split())}", file=sys.stderr)
    return code


def _tell_usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "trainfit"
    message = getattr(error, "format_message", error.__str__)()
    return _tell(f"{message.rstrip('.')}; see {command} --help", EXIT_USAGE)


def _tell_bug(error: Exception) -> int:
    import traceback

    traceback.print_exception(error)
    return _tell(f"a bug of ours ({type(error).__name__}); please report it with the lines above", EXIT_BUG)
