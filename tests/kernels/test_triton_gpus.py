"""Kernels in Triton are refused where Triton does not support the GPU."""

from typing import Any

import pytest

from trainfit.catalog.load import gpus
from trainfit.cli.main import main
from trainfit.kernels.custom_op import require_triton
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.techniques import registry

FIELDS = [("attention", "triton"), ("loss", "fused"), ("loss", "chunked"), ("block_kernels", "triton")]


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_a_t4_is_refused_in_one_line(field: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["llama-3.2-1b", "--set", f"{field}={value}", "--set", "precision=amp-fp16", "--gpu", "t4"]
    assert main(["predict", *arguments]) == 65
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "NVIDIA T4 has compute capability 7.5, and Triton supports 8.0 and later" in line
    assert value in line


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_every_gpu_of_the_catalog_is_judged_by_its_capability(field: str, value: str) -> None:
    refused = set[str]()
    for name in gpus():
        recipe = recipe_from({"model": {"config": "llama-3.2-1b"}, field: value, "hardware": {"gpu": name}})
        try:
            registry.check(recipe)
        except InputError as error:
            amd = gpus()[name].gfx is not None
            assert ("were not tested on AMD" if amd else "Triton supports") in error.problem
            refused.add(name)
    old = {name for name, gpu in gpus().items() if gpu.compute_capability and gpu.compute_capability < (8, 0)}
    assert refused == old | {name for name, gpu in gpus().items() if gpu.gfx}
    assert {"t4", "v100-sxm2-32gb"} <= old


def test_a_real_gpu_is_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainfit.kernels.custom_op.find_spec", lambda _: object())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    with pytest.raises(InputError, match="this old"):
        require_triton("cuda", "attention", "triton", "attention: sdpa")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    require_triton("cuda", "attention", "triton", "attention: sdpa")
    require_triton("cpu", "attention", "triton", "attention: sdpa")


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ({"name": "adamw8bit"}, "use optimizer.name: bnb-adamw8bit"),
        ({"name": "adamw4bit"}, "use optimizer.name: bnb-adamw8bit"),
        ({"name": "adafactor", "implementation": "fused"}, "use foreach or forloop"),
        ({"stochastic_rounding": True}, "leave it out"),
    ],
)
def test_updates_written_in_triton_are_refused_on_older_gpus(optimizer: dict[str, Any], words: str) -> None:
    recipe = {"model": {"config": "llama-3.2-1b"}, "optimizer": optimizer}
    with pytest.raises(InputError, match=f"T4 has compute capability 7.5.*{words}"):
        registry.check(recipe_from(recipe | {"hardware": {"gpu": "t4"}}))
    for name in ("a100-sxm4-80gb", "mi300x", "cpu"):
        registry.check(recipe_from(recipe | {"hardware": {"gpu": name}}))
