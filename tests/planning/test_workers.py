"""Processes that answer requests, some of them with a lower priority."""

import os
from pathlib import Path
from typing import Any

import pytest

from trainfit.planning.workers import CAN_FORK, NICENESS, Answer, Workers


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
