"""The process that traces for the page: one question at a time, each in a fork that can be ended.

The process imports torch once. For each question it forks; the fork answers and ends, so that ending it costs
no later question anything. Where processes cannot fork it answers itself, and is started anew once ended.

Lines of JSON: ``{"number": n, "kind": ..., "request": ...}`` in; out, each with the number,
``{"pid": n}``, then ``{"say": text}`` any number of
times, then ``{"answer": ...}``, ``{"refused": ...}`` or ``{"failed": text}``, at last ``{"end": status}``.
"""

import gc
import importlib
import json
import logging
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import IO, Any

from trainfit.spec.errors import InputError
from trainfit.virtual import forked

CAN_FORK = sys.platform == "linux"
"""Elsewhere a process that has loaded the system's mathematics libraries cannot be forked safely."""
IMPORTS = (
    "trainfit.prediction.trace", "trainfit.rl.estimate.estimate", "trainfit.planning.advice",
    "transformers.models.llama.modeling_llama", "peft",
)  # fmt: skip
PROGRAM = "from trainfit.web.tracer import main; main()"


def main() -> None:
    """Answer the questions on standard input until it closes."""
    lines = _lines_of_answers()
    logging.disable(logging.WARNING)  # Libraries' notes on their own parts, at their import.
    forked.allow()
    gc.disable()  # Imports leave no garbage, and each trace collects its own.
    from trainfit.virtual.trace.process_state import freeze_for_good  # Imports torch.
    from trainfit.web import questions

    for name in IMPORTS:
        with suppress(ImportError):  # The trace that needs it says what is missing.
            importlib.import_module(name)
    freeze_for_good()
    _write(lines, {"ready": os.getpid()}, {})
    child = 0
    for line in sys.stdin:
        if child:
            # Only now, so that its number stood for no other process while it could be ended.
            os.waitpid(child, 0)
        query = json.loads(line)
        if CAN_FORK:
            child = _in_a_fork(query, lines, questions)
        else:
            _write(lines, {"pid": os.getpid()}, query)
            _answer(query, lines, questions)
            _write(lines, {"end": 0}, query)


def _lines_of_answers() -> IO[str]:
    """Return standard output as it was, and let all that libraries print go to standard error."""
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return own


def _in_a_fork(query: dict[str, Any], lines: IO[str], questions: Any) -> int:
    """Answer in a fork and wait for its end, but do not reap it; return its number."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _write(lines, {"pid": os.getpid()}, query)
        _answer(query, lines, questions)
        os._exit(0)
    with suppress(OSError):  # The fork has done so itself, or has ended.
        os.setpgid(child, child)
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    # It may have been ended within a line.
    lines.write("\n")
    _write(lines, {"end": ended.si_status if ended is not None else 0}, query)
    return child


def _answer(query: dict[str, Any], lines: IO[str], questions: Any) -> None:
    def say(text: str) -> None:
        _write(lines, {"say": text}, query)

    try:
        question = questions.question_of(query["kind"], query["request"])
        found = questions.answer(question, say)
        _write(lines, {"answer": found}, query)
        questions.answers.keep(question.key, found)
    except InputError as error:
        _write(lines, {"refused": refusal(error)}, query)
    except Exception as error:
        traceback.print_exc()
        _write(lines, {"failed": type(error).__name__}, query)


def refusal(error: InputError) -> dict[str, Any]:
    """Return an InputError as plain data: field, problem, remedy and the whole line."""
    return {"field": error.field, "problem": error.problem, "remedy": error.remedy, "text": str(error)}


def _write(lines: IO[str], content: dict[str, Any], query: dict[str, Any]) -> None:
    lines.write(json.dumps({"number": query.get("number"), **content}) + "\n")
    lines.flush()
