"""Every shipped example against its record."""

import pytest

from shipped_examples import RECORDS, check_step


@pytest.mark.parametrize("command", RECORDS)
def test_an_examples_step_takes_what_was_measured(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_step(command, monkeypatch)
