"""``predict --tokens``, several GPUs compared, and the MFU of a run's GPU-hours."""

import json
from typing import Any

import pytest

import trainfit
from trainfit.catalog.load import gpu
from trainfit.cli.main import main
from trainfit.spec.errors import InputError

Captured = pytest.CaptureFixture[str]
SMALL = ["predict", "gpt2", "--set", "batch.seq=64"]


def as_json(words: list[str], capsys: Captured) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_takes_its_tokens_at_the_predicted_speed(capsys: Captured) -> None:
    data = as_json([*SMALL, "--gpu", "h200", "--tokens", "100B", "--price", "2"], capsys)
    run = data["run"]
    assert run["run_s"] == pytest.approx(100e9 / data["tokens_per_s"])
    assert run["gpu_hours"] == pytest.approx(run["run_s"] / 3600)
    assert run["dollars"] == pytest.approx(2 * run["gpu_hours"])
    assert run["dollars"] == pytest.approx(data["cost"]["per_million_tokens"] * 1e5)
    assert run["bounds"]["low"] / run["run_s"] == pytest.approx(
        data["bounds"]["step_s"]["low"] / data["step_s"]
    )
    assert main([*SMALL, "--gpu", "h200", "--tokens", "100B", "--price", "2"]) == 0
    assert "A run over 100.00B tokens" in capsys.readouterr().out
    found = trainfit.predict("gpt2", seq=64, gpu="h200", price=2.0).run("100B")
    assert found.model_dump(mode="json") == run
    for tokens in ("many", 0, float("nan")):
        with pytest.raises(InputError, match="tokens = "):
            trainfit.predict("gpt2", seq=64, gpu="h200").run(tokens)


def test_gpus_are_compared_the_cheapest_that_fits_first(capsys: Captured) -> None:
    words = [*SMALL, "--set", "batch.micro=512", "--tokens", "1B"]
    gpus = ["--gpu", "tpu-v5p,t4,h200,mi300x"]
    data = as_json([*words, *gpus], capsys)
    found = {one["gpu"]: one for one in data["gpus"]}
    assert list(found) == ["tpu-v5p", "t4", "h200", "mi300x"]
    assert found["tpu-v5p"]["refused"]
    assert found["tpu-v5p"]["estimate"] is None
    assert [found[name]["estimate"]["fits"] for name in ("t4", "h200", "mi300x")] == [False, True, True]
    for name in ("t4", "h200", "mi300x"):
        run = found[name]["run"]
        assert run["dollars"] == pytest.approx(run["gpu_hours"] * (gpu(name).price_per_hour or 0))
    assert main([*words, *gpus, "--check"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = {name: next(i for i, line in enumerate(lines) if name in line) for name in found}
    cheap, dear = sorted(("h200", "mi300x"), key=lambda name: found[name]["run"]["dollars"])
    assert sorted(at, key=lambda name: at[name]) == [cheap, dear, "t4", "tpu-v5p"]
    assert lines[at[cheap]].startswith("* ")
    assert main([*words, "--gpu", "h200,mi300x", "--check"]) == 0


def test_the_hours_of_a_run_give_its_mfu_and_back(capsys: Captured) -> None:
    """Llama 3.1 8B's published hours imply 13.9 % by 6N alone; causal attention at 8,192 adds 13.4 %."""
    words = "mfu --model llama-3.1-8b --seq 8192 --gpu h100-sxm --tokens 15T --closed-form 6n".split()
    data = as_json([*words, "--gpu-hours", "1.46M"], capsys)
    six_n = 6 * data["params"] * 15e12 / (1.46e6 * 3600 * data["peak_flops_per_s"])
    assert f"{six_n:.1%}" == "13.9%"
    attention = 6 * 32 * 4096 * 8192  # 6 L H (Q + V) s / 2 a token
    assert data["closed_form"]["mfu"] / six_n == pytest.approx(1 + attention / (6 * data["params"]))
    back = trainfit.mfu("llama-3.1-8b", seq=8192, gpu="h100-sxm", tokens="15T", mfu=data["mfu"])
    assert back.gpu_hours == pytest.approx(1.46e6)
    again = trainfit.mfu("llama-3.1-8b", seq=8192, gpu="h100-sxm", tokens=15e12, gpu_hours="1.46M", batch=7)
    assert again.mfu == pytest.approx(data["mfu"])
    assert main([*words, "--gpu-hours", "1.46M", "--mfu", "40%"]) == 2
