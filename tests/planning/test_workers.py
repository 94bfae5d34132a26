"""Processes that answer requests, some of them with a lower priority."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from trainfit.api.recipes import load_recipe
from trainfit.planning.estimates import _result
from trainfit.planning.room import Room
from trainfit.planning.workers import CAN_FORK, NICENESS, Answer, KilledError, Workers


def priority(shared: dict[str, Any]) -> Answer:
    """Answer as a process of a plan does: with its own priority, and what is the same for all requests."""
    return lambda request: {**request, **shared, "niceness": os.nice(0)}


@pytest.mark.skipif(not CAN_FORK, reason="processes cannot be forked here")
def test_requests_ahead_have_processes_of_a_lower_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    workers = Workers(1, f"{Path(__file__).stem}:priority", [], num_ahead=1, shared={"plan": 7})
    try:
        ahead, now = workers.ask({"number": 1}, ahead=True), workers.ask({"number": 2})
        assert ahead.result(120) == {"number": 1, "plan": 7, "niceness": min(19, os.nice(0) + NICENESS)}
        assert now.result(120) == {"number": 2, "plan": 7, "niceness": os.nice(0)}
    finally:
        workers.close()


def growing(shared: dict[str, Any]) -> Answer:
    """Keep as many MiB as a request asks for; the first with a path to ``kill`` is killed."""
    kept: list[bytes] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        kill = Path(request.get("kill", ""))
        if "kill" in request and not kill.exists():
            if "always" not in request:
                kill.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        kept.append(os.urandom(request.get("mib", 0) << 20))
        return {"process": os.getpid(), "kept": len(kept)}

    return answer


def numbered(shared: dict[str, Any]) -> Answer:
    """Answer with the request, the process, and what is the same for all requests."""
    return lambda request: {**request, **shared, "process": os.getpid()}


def ending(shared: dict[str, Any]) -> Answer:
    """End at a request, by an error."""

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        raise SystemExit(1)

    return answer


@pytest.mark.skipif(not CAN_FORK, reason="processes cannot be forked here")
def test_a_process_that_keeps_much_memory_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setattr("trainfit.planning.room.HELD_BYTES", 128 << 20)
    room = Room(lambda: 64 << 30)
    workers = Workers(1, f"{Path(__file__).stem}:growing", [], shared={}, room=room)
    try:
        first, second, third = (workers.ask({"mib": mib}).result(120) for mib in (1, 700, 1))
        assert (first["process"], second["kept"]) == (second["process"], 2)
        assert third["process"] != first["process"]
        assert third["kept"] == 1
        assert 700 << 20 < room.trace_bytes < 1000 << 20
    finally:
        workers.close()


@pytest.mark.skipif(not CAN_FORK, reason="processes cannot be forked here")
def test_a_request_whose_process_was_killed_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    workers = Workers(2, f"{Path(__file__).stem}:growing", [], shared={})
    try:
        found = [workers.ask(each) for each in ({"kill": str(tmp_path / "once")}, {})]
        assert [one.result(120)["kept"] for one in found] == [1, 1]
    finally:
        workers.close()


@pytest.mark.skipif(not CAN_FORK, reason="processes cannot be forked here")
def test_a_process_that_was_killed_between_two_requests_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is that of its own request, with what is the same for all."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    workers = Workers(1, f"{Path(__file__).stem}:numbered", [], shared={"plan": 7})
    try:
        first = workers.ask({"request": 1}).result(120)
        os.kill(first["process"], signal.SIGKILL)
        later = [workers.ask({"request": number}).result(120) for number in (2, 3)]
        assert [(one["request"], one["plan"]) for one in later] == [(2, 7), (3, 7)]
        assert later[0]["process"] == later[1]["process"] != first["process"]
    finally:
        workers.close()


@pytest.mark.skipif(not CAN_FORK, reason="processes cannot be forked here")
def test_a_request_whose_process_is_killed_each_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    workers = Workers(1, f"{Path(__file__).stem}:growing", [], shared={})
    try:
        given = workers.ask({"kill": "/nonexistent/once", "always": True})
        with pytest.raises(KilledError, match="signal 9"):
            given.result(120)
        assert _result(load_recipe("gpt2"), given).refused is not None
        assert workers.ask({}).result(120)["kept"] == 1
    finally:
        workers.close()


@pytest.mark.skipif(not CAN_FORK, reason="processes cannot be forked here")
def test_a_process_that_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    workers = Workers(1, f"{Path(__file__).stem}:ending", [], shared={})
    try:
        with pytest.raises(RuntimeError, match="ended unexpectedly"):
            workers.ask({}).result(120)
    finally:
        workers.close()
