"""A recipe that does not fit: the changes and GPUs named do hold it, as predicted, and none smaller would."""

import json
from pathlib import Path

import pytest

import trainfit
from trainfit.catalog.load import gpus
from trainfit.cli.main import main
from trainfit.planning.search import MARGIN

LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8,
    "num_attention_heads": 8, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
LARGE = {"model": {"config": LLAMA}, "batch": {"micro": 16, "seq": 2048}, "hardware": {"gpu": "rtx-4090"}}


def test_what_is_named_holds_the_recipe() -> None:
    large = trainfit.predict(LARGE)
    assert not large.fits
    found = large.advice()
    assert 1 <= len(found.changes) <= 3
    for one in found.changes:
        again = trainfit.predict(one.as_recipe())
        assert again.fits
        assert again.peak_device_bytes == one.estimate.peak_device_bytes
        assert again.tokens_per_s == pytest.approx(one.estimate.tokens_per_s)
        assert one.as_recipe().batch.tokens == large.recipe.batch.tokens
    order = [(bool(one.numerics), -(one.estimate.tokens_per_s or 0)) for one in found.changes]
    assert order == sorted(order)
    assert found.gpu is not None
    assert trainfit.predict(found.gpu.as_recipe()).fits
    bound = large.peak_device_bytes / (1 - MARGIN)
    smaller = [row for row in gpus().values() if bound <= row.usable_bytes < found.gpu.estimate.device_bytes]
    assert all(row.vendor != "nvidia" or "bf16" not in row.peak_flops_per_s for row in smaller)


def test_the_state_of_a_model_is_shared_by_more_gpus() -> None:
    shape = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 16,
        "num_attention_heads": 64,
    }
    wide = {"model": {"config": LLAMA | shape}, "hardware": {"gpu": "h100-sxm"}, "batch": {"seq": 512}}
    found = trainfit.predict(wide).advice()
    assert found.gpus is not None
    count = found.gpus.estimate.num_gpus
    assert count & (count - 1) == 0
    assert found.gpus.estimate.fits


def test_the_command_prints_it_after_the_prediction(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "large.yaml"
    file.write_text(json.dumps(LARGE))
    assert main(["predict", str(file), "--check"]) == 1
    text = capsys.readouterr().out
    assert text.index("DOES NOT FIT") < text.index("What would fit") < text.index("hardware.gpu: ")
    assert main(["predict", str(file), "--json"]) == 0
    assert "advice" not in json.loads(capsys.readouterr().out)
