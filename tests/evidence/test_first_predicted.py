"""Predictions as first committed, taken from the history of a repository."""

import json
import subprocess
from pathlib import Path

import pytest

from evidence.scripts.accuracy import first_predicted
from evidence.scripts.tables.joined import RESULTS
from trainfit.records import load


def commit(repository: Path, file: Path, lines: list[str]) -> None:
    file.write_text("".join(f"{line}\n" for line in lines))
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["add", "-A"], [*identity, "commit", "-qm", "records"]):
        subprocess.run(["git", "-C", str(repository), *command], check=True)


def changed(line: str, peak_bytes: int) -> str:
    data = json.loads(line)
    del data["digest"]
    data["estimate"]["peak_reserved_bytes"] = peak_bytes
    return json.dumps(data)


def test_the_oldest_committed_prediction_of_each_recipe_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, other = (RESULTS / "h200-predicted.jsonl").read_text().splitlines()[:2]
    measured = (RESULTS / "h200-measured.jsonl").read_text().splitlines()[0]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)
    commit(tmp_path, tmp_path / "a.jsonl", [changed(old, 1), measured])
    commit(tmp_path, tmp_path / "a.jsonl", [changed(old, 2), other])
    out = tmp_path / "out" / "first.jsonl"
    assert first_predicted.main([str(out), "a.jsonl"]) == 0
    found = {one.recipe_id: one.estimate for one in load(out)}
    ids = [json.loads(line)["recipe_id"] for line in (old, other)]
    assert list(found) == ids
    first = found[ids[0]]
    assert first is not None
    assert first.peak_reserved_bytes == 1
    assert all("digest" in json.loads(line) for line in out.read_text().splitlines())
