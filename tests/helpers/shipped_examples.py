"""The shipped examples, traced, against what their steps took on an H200 (results/examples/h200.jsonl)."""

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
    for row in map(json.loads, (ROOT / "results" / "examples" / "h200.jsonl").open())
}
LOW, HIGH = 0.8, 1.3
"""Measured over predicted where the GPU decides; measured with torch 2.11 and transformers 5.17."""
LOW_OF = {"image_classification.py --compile --steps 7": 0.6}
"""Not measured against its record since the compiled backward's convolutions keep channels last."""
HOST_DECIDES = {
    "encoder_decoder.py --steps 7": 1.75,
    "encoder_decoder.py --checkpointing --steps 7": 1.75,
    "hf_trainer.py --model llama --batch-size 4 --accumulate 2 --checkpointing --steps 7": 2.0,
    "encoder_decoder.py --model bart --compile --steps 7": 1.75,
}
"""Steps that waited for the host, whose work in a script is known less well: the high end."""


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
        traced = trainfit.trace(lambda: example.train(args), steps=1)
    assert traced.step_s is not None
    ratio = RECORDS[command]["step_s"] / traced.step_s
    # Scripts' host costs are of slower hosts than the one that the examples were measured on.
    low = 0.4 if traced.time.host_s > 0.1 * traced.step_s else LOW_OF.get(command, LOW)
    assert low < ratio < HOST_DECIDES.get(command, HIGH)
