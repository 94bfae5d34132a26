"""AMD GPUs are predicted by PyTorch's ROCm source; devices without modelled kernels are refused."""

import json

import pytest
import torch

from tiny_recipe import tiny_recipe
from trainfit.catalog.load import gpu, gpus
from trainfit.cli.main import main
from trainfit.prediction.estimate import estimate
from trainfit.prediction.machine import machine_with
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Hardware
from trainfit.virtual.cuda.scratch import GpuTraits, scratch_bytes
from trainfit.virtual.cuda.scratch.gpu_traits import GFX

AMD = ["mi250x-gcd", "mi300x", "mi325x", "mi350x", "mi355x"]
MIB = 2**20


def test_every_gpu_has_a_basis_and_each_modelled_one_has_traits() -> None:
    by_basis = {name: {row.name for row in gpus().values() if row.basis == name} for name in (
        "measured", "modelled", "accounted")}  # fmt: skip
    assert by_basis["measured"] == {"h100-sxm", "h200"}
    assert set(AMD) <= by_basis["modelled"]
    assert {"tpu-v5p", "gaudi3", "mi250x"} <= by_basis["accounted"]
    for name in by_basis["measured"] | by_basis["modelled"]:
        assert GpuTraits.of(gpu(name)).num_sms == gpu(name).num_sms
    for name in by_basis["accounted"]:
        with pytest.raises(InputError, match="listed for mfu"):
            GpuTraits.of(gpu(name))
    assert {row.gfx for row in gpus().values() if row.gfx} <= set(GFX)


def test_the_list_shows_the_basis(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    shown = [lines[name][-1] for name in ("h200", "mi300x", "tpu-v5p")]
    assert shown == ["measured", "modelled", "accounted"]
    assert main(["gpus", "mi300x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["basis"] == "modelled"


def test_an_mi300x_takes_hipblaslts_workspaces_and_states_what_is_assumed() -> None:
    recipe = tiny_recipe("native", 2, hardware=Hardware(gpu="mi300x"))
    ledger = trace(recipe)
    workspaces = [s.num_bytes for s in ledger.storages if s.category == "workspace"]
    assert workspaces == [76 * MIB, 76 * MIB]  # The main thread's and autograd's.
    found = estimate(recipe, machine_with(gpu("mi300x")), ledger)
    assert found.fits
    assert found.step_s is not None
    assert found.bounds["step_s"].high == pytest.approx(5 * found.step_s)
    assert not found.warnings
    full = gpu("mi300x").model_copy(update={"usable_bytes": round(found.peak_device_bytes * 1.03)})
    assert any("less than 5%" in line for line in estimate(recipe, machine_with(full), ledger).warnings)
    assert any("AOTriton" in line and "nothing measured" in line for line in found.assumptions)


def test_aotriton_keeps_no_gradient_of_the_queries_in_fp32() -> None:
    shape = (2, 8, 256, 64)
    q, k, v, out, grad = (
        torch.empty(2, 256, 8, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2) for _ in range(5)
    )
    assert q.shape == shape
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    args = (grad, q, k, v, out, None, None, None, 256, 256, 0.0, True, None, None)
    rows = 2 * 8 * 256
    assert scratch_bytes(backward, args, {}, None, gpu=GpuTraits.of(gpu("mi300x"))) == (rows * 4, rows * 4)
    assert sum(scratch_bytes(backward, args, {}, None, gpu=GpuTraits())) == rows * 4 + rows * 64 * 4
