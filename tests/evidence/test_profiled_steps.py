"""What docs/guide/explain.md shows of the recorded traces, and what their records say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from evidence.scripts.fill_outputs import commands, refreshed
from page_claims import ROOT
from trainfit.cli.main import main
from trainfit.explanation.trace.explain import Given, explain_trace
from trainfit.explanation.trace.read import read_trace

TRACES = ROOT / "evidence/records/profiled-steps"
ROWS = {
    row["name"]: row for row in map(json.loads, (TRACES / "profiled-steps.jsonl").read_text().splitlines())
}
PAGE = (ROOT / "docs/guide/explain.md").read_text("utf-8")
SHOWN = {
    words[2]: (words[3:], shown)
    for block in re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for command, shown in commands(block)
    if (words := command.split())[2].endswith(".json.gz")
}


def rounded(facts: dict[str, Any]) -> dict[str, Any]:
    """Sums of many durations differ in their last digits between machines."""
    return json.loads(json.dumps(facts), parse_float=lambda text: float(f"{float(text):.9g}"))


@pytest.mark.parametrize("name", ROWS)
def test_a_record_says_what_its_trace_shows(name: str) -> None:
    row = ROWS[name]["explained"]
    given = Given(*(row["utilisation"][field] for field in ("flops", "peak_flops_per_s", "dtype")))
    path = TRACES / row["file"]
    found = explain_trace(read_trace(path), path, given=given).model_dump(mode="json")
    assert rounded(found | {"file": path.name}) == rounded(row)


def test_the_step_as_it_should_be_has_the_predicted_time_and_utilisation() -> None:
    predicted, found = ROWS["as-it-should-be"]["predicted"], ROWS["as-it-should-be"]["explained"]
    assert found["step_s"] == pytest.approx(predicted["step_s"], rel=0.01)
    assert found["utilisation"]["mfu"] == pytest.approx(predicted["mfu"], rel=0.02)


@pytest.mark.parametrize("name", ROWS)
def test_the_page_shows_what_is_printed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more, shown = SHOWN[f"{name}.json.gz"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / f"{name}.json.gz").symlink_to(TRACES / f"{name}.json.gz")
    for recipe in more:
        (tmp_path / recipe).write_text(json.dumps(ROWS[name]["recipe"]))
    assert main(["explain", f"{name}.json.gz", *more]) == 0
    printed = capsys.readouterr().out.splitlines()
    while printed and not printed[-1]:
        printed.pop()
    assert refreshed(shown, printed) == shown
