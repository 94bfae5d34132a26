"""Numbers that no run has, in every option that takes one: an answer in numbers, or one line and 2 or 65."""

import json
from pathlib import Path

import pytest

import trainfit
from trainfit.cli.main import main
from trainfit.spec.errors import InputError

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 384, "max_position_embeddings": 64,
}  # fmt: skip
EXTREME = ("0", "-1", "1e-320", "1e308", "inf", "nan", "1" + "0" * 30, str(2**63), "9" * 400)
MFU = ("mfu", "--batch", "1", "--seq", "16")
OPTIONS: dict[tuple[str, ...], tuple[str, ...]] = {
    (*MFU, "--step-s", "1"): ("--tokens", "--batch", "--seq", "--count", "--rank", "--peak-flops", "--price"),
    (*MFU, "--mfu", "0.4", "--tokens", "1B"): ("--tokens", "--batch", "--count", "--price", "--mfu"),
    (*MFU, "--gpu-hours", "1", "--tokens", "1B"): ("--gpu-hours", "--tokens"),
    MFU: ("--step-s",),
    ("communication", "--hidden", "64", "--feed-forward", "64", "--fsdp", "4", "--tensor", "2"): (
        "--hidden", "--feed-forward", "--blocks", "--fsdp", "--tensor", "--fsdp-axes", "--tensor-axes",
        "--peak-flops", "--link-rate", "--batch", "--memory-gib", "--sharded",
    ),
    ("ultrascale",): ("--a", "--b", "--h", "--h-ff", "--L", "--s", "--v", "--k", "--t", "--d", "--zero"),
    ("predict", "RECIPE"): ("--tokens", "--price", "--batch", "--seq", "--count"),
    ("explain", "RECIPE"): ("--top", "--eval-batch", "--longest"),
}  # fmt: skip
REFUSED: dict[tuple[str, ...], tuple[str, ...]] = {
    ("plan", "RECIPE"): ("--memory-gib", "--host-memory-gib", "--tokens", "--tokens-per-step", "--margin"),
    ("measure", "RECIPE"): ("--steps", "--warmup", "--timeout"),
    ("train", "RECIPE", "--out", "run"): ("--steps", "--gpus", "--keep", "--warmup-steps", "--hang-timeout"),
    ("trace", "script.py"): ("--steps", "--world-size", "--nodes"),
    ("sweep", "RECIPE"): ("--jobs", "--steps", "--warmup", "--timeout", "--memory-limit-gib"),
    ("verify",): ("--count", "--timeout"),
    ("calibrate",): ("--limit-s",),
}  # fmt: skip
"""Verbs that would work for long if they took a number."""
NEVER = ("-1", "1e-320", "1e308", "inf", "nan", "1" + "0" * 30, "9" * 400)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {{config: {json.dumps(CONFIG)}}}\nbatch: {{micro: 1, seq: 16}}\nhardware: h200\n"
    )
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return path


def test_an_answer_in_numbers_or_one_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for begin, names in OPTIONS.items():
        words = [str(recipe) if word == "RECIPE" else word for word in begin]
        words += ["--model", str(recipe.with_name("config.json"))] if words[0] == "mfu" else []
        for name in names:
            for value in EXTREME:
                if _is_answered([*words, name, value], capsys):
                    assert _is_answered([*words, name, value, "--json"], capsys)


def _is_answered(words: list[str], capsys: pytest.CaptureFixture[str]) -> bool:
    code = main(words)
    out, err = capsys.readouterr()
    assert code in (0, 2, 65), (words, err)
    if code:
        (line,) = err.splitlines()
        assert line.startswith("trainfit: error: "), words
    assert not {"nan", "inf", "Infinity", "NaN"} & set(out.replace(":", " ").split()), words
    return code == 0


@pytest.mark.parametrize("begin", REFUSED, ids=lambda begin: begin[0])
def test_refused_before_any_work(
    begin: tuple[str, ...], recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in REFUSED[begin]:
        for value in NEVER:
            words = [str(recipe) if word == "RECIPE" else word for word in begin[1:]]
            code = main([begin[0], name, value, *words])
            (line,) = capsys.readouterr().err.splitlines()
            assert code in (2, 65), (name, value, line)
            assert line.startswith("trainfit: error: "), (name, value)


@pytest.mark.parametrize("given", [{"memory_gib": 1e308}, {"host_memory_gib": 1e308}, {"memory_gib": 1e-320}])
def test_a_plan_of_no_memory_there_is(given: dict[str, float], recipe: Path) -> None:
    with pytest.raises(InputError, match="no size of a memory"):
        trainfit.plan(str(recipe), **given)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("given", [{"steps": -1}, {"steps": 10**30}, {"warmup": 10**10}])
def test_a_measurement_of_no_steps_there_are(given: dict[str, int], recipe: Path) -> None:
    with pytest.raises(InputError, match="not so many steps"):
        trainfit.measure(str(recipe), gpu="cpu", device="cpu", **given)  # pyright: ignore[reportArgumentType]
