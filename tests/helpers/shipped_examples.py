"""The shipped examples, traced, against steps on an H200 (evidence/records/examples/h200.jsonl)."""

import contextlib
import importlib.util
import json
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

import trainfit

ROOT = Path(__file__).parents[2]
RECORDS = {
    row["command"].removeprefix("examples/"): row["measured"]
    for row in map(json.loads, (ROOT / "evidence" / "records" / "examples" / "h200.jsonl").open())
}
LOW, HIGH = 0.8, 1.3
"""Measured over predicted; measured with torch 2.11 and transformers 5.17."""
MISSED = {
    "encoder_decoder.py --model bart --steps 7": "predicted at 96.9 ms, measured 70.8: scripts' host costs "
    "are of slower hosts than this record's",
}
"""Outside the bounds, by name and with the cause; one that lies inside again is to be removed."""


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments_of(module: ModuleType, given: list[str], monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Return what the example's own parser makes of a command line."""
    found = list[Namespace]()
    with monkeypatch.context() as patched:
        patched.setattr(module, "train", lambda args: found.append(args) or {})
        module.main(given)
    return found[0]


def check_step(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace an example as it is; its step takes what was measured."""
    name, *given = shlex.split(command)
    example = loaded(ROOT / "examples" / name)
    args = arguments_of(example, given, monkeypatch)
    with contextlib.redirect_stdout(sys.stderr):
        # The records' steps are steady ones: the first also makes the optimizer's states.
        traced = trainfit.trace(lambda: example.train(args), steps=2)
    assert traced.step_s is not None
    ratio = RECORDS[command]["step_s"] / traced.step_s
    is_inside = LOW < ratio < HIGH
    assert is_inside == (command not in MISSED), f"measured over predicted: {ratio:.2f}"
    if command in MISSED:
        pytest.xfail(MISSED[command])
