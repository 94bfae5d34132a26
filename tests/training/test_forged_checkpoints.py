"""A run's folder whose manifests are right and whose content is not: one line, and nothing is loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_training import LLAMA, options_for, tiny
from trainfit.spec.errors import InputError
from trainfit.training import durable
from trainfit.training.loop import train

Run = tuple[Path, dict[str, bytes]]  # A run's folder, and its checkpoint's files as they were written


def sealed(folder: Path) -> None:
    """Write the manifest of what now lies in the folder."""
    (folder / durable.MANIFEST).unlink(missing_ok=True)
    durable._seal(folder)


def started(out: Path, *settings: str) -> Path:
    """Train one step; return its checkpoint."""
    train(tiny(*settings), options_for(out, 1))
    return out / "checkpoints" / "step-00000001"


def refused(out: Path, *settings: str) -> str:
    with pytest.raises(InputError) as caught:
        train(tiny(*settings), options_for(out, 2, resume=True))
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    assert caught.value.remedy
    return line


def put(*path: Any) -> Callable[[Any], Any]:
    """Return a change of JSON: the last of ``path`` is the value at the other keys, or of everything."""

    def change(data: Any) -> Any:
        *outer, value = path
        if not outer:
            return value
        inner = data
        for part in outer[:-1]:
            inner = inner[part]
        inner[outer[-1]] = value
        return data

    return change


def without(key: str) -> Callable[[Any], Any]:
    return lambda data: {name: value for name, value in data.items() if name != key}


GROUP = ("optimizer", "groups", 0, 0)


STATES = {
    "not a mapping": put([1]),
    "no optimizer": without("optimizer"),
    "a foreign key": put("more", 1),
    "another step": put("step", 7),
    "a huge step": put("step", 10**30),
    "true": put("step", True),
    "shared with nothing": put("shared", {"model.norm.weight": "nowhere"}),
    "no groups": put("optimizer", "groups", []),
    "other parameters": put(*GROUP, "params", ["nowhere"]),
    "lr negative": put(*GROUP, "lr", -1.0),
    "lr text": put(*GROUP, "lr", "1"),
    "betas": put(*GROUP, "betas", [2.0, 2.0]),
    "a foreign setting": put(*GROUP, "__class__", 1),
    "a scalar of nothing": put("optimizer", "scalars", {"nowhere/step": 1}),
    "a scalar of text": put("optimizer", "scalars", {"model.norm.weight/step": "1"}),
    "a foreign scalar": put("optimizer", "scalars", {"model.norm.weight/more": 1}),
    "python's generator": put("random", "python", [3, [1, 2], None]),
    "python's generator huge": put("random", "python", 1, [2**70] * 625),
    "numpy's generator": put("random", "numpy", ["MT19937", [1], 0, 0, 0.0]),
    "numpy's other generator": put("random", "numpy", ["nothing", [1] * 624, 0, 0, 0.0]),
}
WRONG_KIND = json.dumps({"files": {"state.json": 1}, "sha256": durable._digest({"state.json": 1})})
TEXTS = {
    "state.json": [
        "", "NaN", '{"step": NaN}', "9" * 5000, "[" * 5000, '{"a": "\\ud800"}', '{"step": 1, "step": 1}',
    ],
    "run.json": ["[]", "{}", '{"recipe": 1, "options": {}, "environment": {}}', "[" * 5000],
    "manifest.json": ["[]", "{}", '{"files": {}, "sha256": "x"}', "[" * 5000, "9" * 5000, WRONG_KIND],
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run and its checkpoint's files as they were written."""
    out = tmp_path_factory.mktemp("forged") / "run"
    saved = started(out)
    return out, {file.name: file.read_bytes() for file in saved.iterdir()}


def restored(run: Run) -> Path:
    out, files = run
    saved = out / "checkpoints" / "step-00000001"
    for file in saved.iterdir():
        file.unlink()
    for name, content in files.items():
        (saved / name).write_bytes(content)
    return saved


@pytest.mark.parametrize("name", STATES)
def test_state_json(name: str, run: Run) -> None:
    saved = restored(run)
    state = saved / "state.json"
    state.write_text(json.dumps(STATES[name](json.loads(state.read_text()))))
    sealed(saved)
    before = torch.get_rng_state()
    refused(run[0])
    assert torch.equal(torch.get_rng_state(), before) or "random" in name or "generator" in name


@pytest.mark.parametrize("name", TEXTS)
def test_text(name: str, run: Run) -> None:
    for text in TEXTS[name]:
        saved = restored(run)
        (saved / name).write_text(text)
        if name != durable.MANIFEST:
            sealed(saved)
        assert name in refused(run[0]), text


def changed(
    ending: str, *changes: Callable[[torch.Tensor], Any]
) -> Callable[[dict[str, torch.Tensor]], None]:
    """Return a change of the first tensor whose name ends so; without ``changes`` it is dropped."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in sorted(tensors) if name.endswith(ending))
        tensor = tensors.pop(name)
        for change in changes:
            tensors[name] = change(tensor)

    return edit


TENSORS = {
    "model shape": ("model", changed("norm.weight", lambda t: t[:1].clone())),
    "model dtype": ("model", changed("norm.weight", torch.Tensor.half)),
    "model NaN": ("model", changed("norm.weight", lambda t: t * float("nan"))),
    "model missing": ("model", changed("norm.weight")),
    "moment shape": ("optimizer", changed("exp_avg", lambda t: t.flatten()[:1].clone())),
    "moment dtype": ("optimizer", changed("exp_avg", torch.Tensor.int)),
    "moment NaN": ("optimizer", changed("exp_avg", lambda t: t * float("nan"))),
    "moment below 0": ("optimizer", changed("exp_avg_sq", lambda t: t - 1)),
    "moment missing": ("optimizer", changed("exp_avg")),
    "moment of nothing": ("optimizer", lambda tensors: tensors.update({"more/exp_avg": torch.ones(1)})),
    "steps below 0": ("optimizer", changed("/step", lambda t: t * 0 - 5)),
    "steps NaN": ("optimizer", changed("/step", lambda t: t * float("nan"))),
    "steps of a shape": ("optimizer", changed("/step", lambda t: torch.ones(3))),
    "generator": ("random", changed("host", lambda t: t[:5].clone())),
    "no generator": ("random", lambda tensors: tensors.update(other=tensors.pop("host"))),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str, run: Run) -> None:
    saved = restored(run)
    kind, edit = TENSORS[name]
    file = saved / f"{kind}-00000.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)
    sealed(saved)
    refused(run[0])


@pytest.mark.parametrize("kind", ["model", "optimizer", "random"])
def test_no_safetensors(kind: str, run: Run) -> None:
    without_tensors = b"\x02\0\0\0\0\0\0\0{}"
    for content in (b"", b"\xff" * 64, (2**62).to_bytes(8, "little") + b"{}", without_tensors):
        if kind == "optimizer" and content == without_tensors:  # As after a step without gradients.
            continue
        saved = restored(run)
        (saved / f"{kind}-00000.safetensors").write_bytes(content)
        sealed(saved)
        refused(run[0])


def test_scaler(tmp_path: Path) -> None:
    saved = started(tmp_path / "run", "precision=amp-fp16")
    state = saved / "state.json"
    content = json.loads(state.read_text())
    for scaler in (None, {}, {"scale": "x"}, {"scale": -1.0}, []):
        state.write_text(json.dumps(content | {"scaler": scaler}))
        sealed(saved)
        assert "scaler" in refused(tmp_path / "run", "precision=amp-fp16"), scaler


INDICES = [
    put([]), without("dtype"), put("dtype", "object"), put("dtype", "float64"),
    put("train", "tokens", 10**12), put("train", "tokens", -1), put("train", None), put("identity", []),
    put("tokenizer_tokens", "x"),
]  # fmt: skip


def test_index_and_tokens(tmp_path: Path) -> None:
    started(tmp_path / "run")
    data = tmp_path / "run" / "data"
    index = data / "index.json"
    content = index.read_text()
    for number, change in enumerate(INDICES):
        index.write_text(json.dumps(change(json.loads(content))))
        sealed(data)
        assert "index.json" in refused(tmp_path / "run"), number
    index.write_text(content)
    (data / "train.bin").write_bytes(b"\xff" * (data / "train.bin").stat().st_size)
    sealed(data)
    assert f"vocabulary has {LLAMA['vocab_size']}" in refused(tmp_path / "run")


def test_what_was_written_is_still_taken(run: Run) -> None:
    saved = restored(run)
    sealed(saved)
    assert train(tiny(), options_for(run[0], 2, resume=True)).status == "done"
