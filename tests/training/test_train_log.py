"""The JSONL log of a resumed run: what is missing is said and noted, the remaining lines are kept."""

import json
from pathlib import Path

import pytest

from tiny_training import asked, tiny
from trainfit.spec.errors import InputError
from trainfit.training.log import LOG, JsonlLog, cut_after
from trainfit.training.loop import train


def line(step: int, kind: str = "step") -> str:
    return json.dumps({"kind": kind, "step": step, "loss": 1.0}) + "\n"


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([1, 2, 3, 4, 5, 6], ""),
        ([1, 2, 5, 6], "has no line of steps 3 to 4"),
        ([1, 2, 4, 6], "has no line of steps 3, 5"),
        ([1, 2, 3, 4, 5], "has no line of step 6"),
        ([], "has no line of steps 1 to 6"),
        ([1, 2, 3, 3, 4, 5, 6], "has step 3 more than once"),
        ([1, 2, 4, 3, 5, 6], "is not in the order of the steps"),
        ([1, 2, 9, 3, 4, 6, 5], "is not in the order of the steps"),
        (
            [1, 3, 2, 2, 6],
            "has no line of steps 4 to 5, has step 2 more than once, is not in the order of the steps",
        ),
    ],
)
def test_what_is_wrong_with_the_lines(steps: list[int], says: str, tmp_path: Path) -> None:
    path = tmp_path / LOG
    path.write_text("".join(map(line, steps)) + line(4, "eval") + line(7) + '{"kind": "st')
    assert cut_after(path, 6).gaps(6) == says
    kept = [step for step in steps if step <= 6]
    assert path.read_text() == "".join(map(line, kept)) + line(4, "eval"), "nothing up to the step is lost"
    assert [other.name for other in tmp_path.iterdir()] == [LOG]


def test_a_hole_is_said_on_resume_and_noted_once(tmp_path: Path) -> None:
    train(tiny(), asked(tmp_path, 6), observers=[JsonlLog()])
    path = tmp_path / LOG
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[4:]))
    said: list[str] = []
    for steps in (8, 9):
        resumed = train(tiny(), asked(tmp_path, steps, resume=True), observers=[JsonlLog(said.append)])
        assert resumed.status == "done"
    assert said == [f"{path} has no line of steps 3 to 4; the remaining lines are kept"] * 2
    entries = [json.loads(one) for one in path.read_text().splitlines()]
    assert [one["step"] for one in entries if one["kind"] == "step"] == [1, 2, 5, 6, 7, 8, 9]
    assert [one["step"] for one in entries if one["kind"] == "gap"] == [6]


def test_a_whole_log_says_nothing(tmp_path: Path) -> None:
    train(tiny(), asked(tmp_path, 3), observers=[JsonlLog()])
    said: list[str] = []
    train(tiny(), asked(tmp_path, 5, resume=True), observers=[JsonlLog(said.append)])
    assert said == []
    assert '"gap"' not in (tmp_path / LOG).read_text()


def test_a_line_that_is_no_log_line_is_refused_with_its_number(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text(line(1) + '{"kind": "step", "st\n' + line(3))
    before = (tmp_path / LOG).read_bytes()
    with pytest.raises(InputError, match=r"log\.jsonl:2: the line is not what trainfit wrote"):
        cut_after(tmp_path / LOG, 5)
    assert (tmp_path / LOG).read_bytes() == before
