"""Text of ``predict``: the answer first, no empty lines, warnings, progress on a terminal; ``--check``."""

import json
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainfit.catalog.load import gpu
from trainfit.cli.main import main
from trainfit.cli.options import EXIT_DOES_NOT_FIT
from trainfit.prediction.estimate import estimate as estimated
from trainfit.prediction.machine import machine_with
from trainfit.prediction.predict import ledger_of, predict
from trainfit.report.precision import meaning, storage
from trainfit.report.prediction_text import show
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate

Captured = pytest.CaptureFixture[str]
LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "vocab_size": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def tiny(**fields: object) -> Recipe:
    more = {"batch": {"micro": 1, "seq": 64}, "hardware": {"gpu": "h200"}, **fields}
    return recipe_from({"model": {"config": LLAMA, "name": "tiny"}, **more})


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    return predict(tiny())


def printed(capsys: Captured, monkeypatch: pytest.MonkeyPatch, estimate: Estimate, width: int = 80) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    show(tiny(), estimate)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 120])
def test_the_answer_comes_first(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, estimate: Estimate, width: int
) -> None:
    lines = printed(capsys, monkeypatch, estimate, width).splitlines()
    assert max(map(len, lines)) <= width
    head = lines[: lines.index("")]
    assert len(head) <= 9
    assert re.match(r"FITS on h200: [\d.]+ GiB of 139\.80 GiB, [\d.]+ GiB \(99\.\d%\) to spare$", head[0])
    words = " ".join(" ".join(head).split())
    assert f"{estimate.tokens_per_s:,.0f} tokens/s" in words
    assert f"{estimate.mfu:.1%} MFU" in words
    assert "$ a million tokens" in words
    assert "bf16: weights 2 B, no fp32 master weights, AdamW moments 2 + 2 B a parameter" in words


def test_lines_without_content_go_and_conventions_wait_for_verbose(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, estimate: Estimate
) -> None:
    text = printed(capsys, monkeypatch, estimate)
    assert " 0 B" not in text
    assert "communication" not in text
    assert "Conventions" not in text
    show(tiny(), estimate, verbose=True)
    assert "masked attention scores" in " ".join(capsys.readouterr().out.split())


def test_notes_are_printed_without_verbose(capsys: Captured, estimate: Estimate) -> None:
    show(tiny(), estimate, notes=["attention: best -> cudnn"])
    assert "attention: best -> cudnn" in capsys.readouterr().out


@pytest.mark.parametrize(("free", "warns"), [(0.001, True), (0.0099, True), (0.0101, False), (-0.1, False)])
def test_less_than_one_per_cent_of_headroom_is_warned_of(
    free: float, warns: bool, estimate: Estimate
) -> None:
    size = math.ceil(estimate.peak_device_bytes / (1 - free))
    row = gpu("h200").model_copy(update={"usable_bytes": size})
    found = estimated(tiny(), machine_with(row), ledger_of(tiny()))
    assert found.fits is (free >= 0)
    assert any("less than 1% of the device is free" in line for line in found.warnings) is warns


def test_a_warning_is_part_of_the_answer(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, estimate: Estimate
) -> None:
    text = printed(capsys, monkeypatch, estimate.model_copy(update={"warnings": ("it is close",)}))
    assert "warning    it is close" in text[: text.index("\n\n")]


def test_check_exits_with_1_where_it_does_not_fit(capsys: Captured, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    text = json.dumps({"model": {"config": LLAMA}, "batch": {"seq": 64}, "hardware": {"gpu": "h200"}})
    recipe.write_text(text)
    large = ["predict", str(recipe), "--set", "batch.micro=60000"]
    assert main(["predict", str(recipe), "--check"]) == 0
    assert main([*large, "--no-advice"]) == 0
    assert main([*large, "--no-advice", "--check"]) == EXIT_DOES_NOT_FIT == 1
    assert "DOES NOT FIT on h200" in capsys.readouterr().out
    assert main([*large, "--check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_an_emulated_dtype_is_warned_of() -> None:
    found = predict(tiny(hardware={"gpu": "V100"}))
    assert any("no bf16 tensor cores" in line for line in found.warnings)
    assert set(found.warnings) <= set(found.assumptions)


WORDS: list[tuple[dict[str, object], str]] = [
    ({}, "weights 2 B, no fp32 master weights, AdamW moments 2 + 2 B a parameter"),
    ({"precision": "fp32"}, "weights 4 B (fp32 master weights), AdamW moments 4 + 4 B"),
    ({"optimizer": "adamw8bit"}, "8-bit AdamW moments 1 + 1 B"),
    ({"optimizer": "adafactor"}, "Adafactor rows and columns of the second moment"),
    ({"optimizer": "sgd"}, "SGD without moments, 0 B"),
    ({"adapter": {"kind": "lora", "dtype": "base"}}, "adapter 2 B, AdamW moments 2 + 2 B a trained"),
]
WORDS_AND_BYTES: list[tuple[dict[str, object], str]] = [
    ({"precision": "amp-bf16"},
     "weights 4 B (fp32 master weights), AdamW moments 4 + 4 B a parameter; products in bf16"),
    ({"optimizer": "adamw4bit"}, "4-bit AdamW moments 0.5 + 0.5 B"),
    ({"optimizer": {"name": "adafactor", "momentum": 0.9}}, "Adafactor momentum 4 B and rows"),
    ({"optimizer": {"name": "sgd", "momentum": 0.9}}, "SGD momentum 2 B"),
    ({"adapter": "lora"},
     "frozen base 2 B a parameter, adapter 4 B, AdamW moments 4 + 4 B a trained parameter"),
    ({"adapter": "lora", "quantize": "nf4"}, "frozen base 0.5 B in nf4 a parameter"),
]  # fmt: skip


def test_the_precision_is_put_into_words() -> None:
    for fields, words in WORDS:
        assert words in meaning(tiny(**fields))


@pytest.mark.parametrize(("fields", "words"), WORDS_AND_BYTES)
def test_what_the_precision_means_is_what_the_step_holds(fields: dict[str, object], words: str) -> None:
    recipe = tiny(**fields)
    assert words in meaning(recipe)
    held, found = storage(recipe), predict(recipe)
    # State of small tensors, scales and step counts are within a tenth of a byte.
    assert found.breakdown.optimizer / found.trainable_params == pytest.approx(held.moment, abs=0.1)
    if recipe.quantize is None:
        frozen = (found.params - found.trainable_params) * (held.frozen or 0.0)
        weights = frozen + found.trainable_params * held.weight
        assert found.breakdown.weights == pytest.approx(weights, rel=0.001)


def test_progress_is_on_a_terminal_before_torch_is_imported_and_never_in_json(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps({"model": {"config": LLAMA, "name": "tiny"}, "batch": {"seq": 32}}))
    assert main(["predict", str(recipe), "--json"]) == 0  # The process finds its ledger.
    code = (
        "import sys; from trainfit.report import console as show; inner = show.progress\n"
        "def watched(text):\n"
        "    print('torch' in sys.modules, file=open(sys.argv.pop(), 'w')); return inner(text)\n"
        "show.progress = watched\n"
        "from trainfit.cli.main import main; sys.exit(main(sys.argv[1:-1]))"
    )
    torch_then = tmp_path / "torch"
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code, "predict", str(recipe), "--json", str(torch_then)],
        stdout=subprocess.PIPE, stderr=slave, env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )  # fmt: skip
    os.close(slave)
    out, _ = process.communicate(timeout=60)
    seen = os.read(master, 4096)
    os.close(master)
    assert process.returncode == 0, seen
    assert json.loads(out)["fits"]
    assert b"predicting tiny" in seen
    assert torch_then.read_text() == "False\n"


def test_without_a_terminal_nothing_is_drawn(capsys: Captured) -> None:
    from trainfit.report.console import progress

    with progress("predicting"):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_reader_who_leaves_is_not_taken_for_what_does_not_fit() -> None:
    """Exit code 1 is that of ``--check``."""
    assert main(["predict", "tiny-cpu"]) == 0  # The process finds its ledger.
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", "import sys; from trainfit.cli.main import main; sys.exit(main())"]
    try:
        ended = subprocess.run(
            [*command, "predict", "tiny-cpu", "--check"],
            stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    progress = ("predicting tiny-llama-demo on cpu: one step on the virtual GPU (",)
    assert ended.returncode == 74
    assert [line for line in ended.stderr.splitlines() if not line.startswith(progress)] == []


def test_an_optimizer_added_from_outside_is_named_without_its_moments() -> None:
    recipe = Recipe.model_validate({"model": {"config": "llama-3.2-1b"}, "batch": {"micro": 1, "seq": 8}})
    outside = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"name": "lion"})})
    assert "lion a parameter" in meaning(outside)
