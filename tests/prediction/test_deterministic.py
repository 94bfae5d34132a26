"""Kernels that repeat bit by bit, which ``train`` runs by default, are predicted by one argument alone."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_recipe import TINY_LLAMA, tiny_recipe
from trainfit.api.flops import step_flops
from trainfit.catalog.load import gpu
from trainfit.cli.main import main
from trainfit.kernels.determinism import deterministic_kernels
from trainfit.prediction import cache
from trainfit.prediction.predict import ledger_of, predict
from trainfit.prediction.trace import DETERMINISTIC, trace
from trainfit.spec.recipe import Batch, Recipe
from trainfit.spec.sweep import TrainPart
from trainfit.sweeps import trial
from trainfit.sweeps.parts import PartRequest
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.cuda.scratch.libraries import cublas_workspace_bytes
from trial_start import processes
from virtual_runs import recipe_of

LLAMA = TINY_LLAMA | {
    "hidden_size": 512, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}  # fmt: skip


def recipe(attention: str, **fields: Any) -> Recipe:
    return recipe_of(LLAMA, "native", attention=attention, batch=Batch(micro=2, seq=256), **fields)


def scratch(ledger: Any, operation: str) -> int:
    """Bytes that the operation's middle layer makes in its steady step."""
    positions = [i for i, op in enumerate(ledger.ops) if operation in op.name]
    return sum(storage.num_bytes for storage in ledger.storages if storage.op == positions[-1])


def test_inside_and_afterwards() -> None:
    wanted = torch.are_deterministic_algorithms_enabled
    with deterministic_kernels():
        assert wanted()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        with deterministic_kernels(False):
            assert not wanted()
        assert wanted()
    assert not wanted()
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(KeyError), deterministic_kernels(False):
            raise KeyError
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("attention", "operation", "factor"),
    # Gluon's fp32 sums of dQ are not there; PyTorch's flash makes ceil(132 / (2 x 4)) copies of them.
    [("triton", "flash_attention_backward", 0), ("flash", "flash_attention_backward", 17)],
)
def test_the_kernels_that_train_runs(attention: str, operation: str, factor: int) -> None:
    usual, repeatable = (trace(recipe(attention), deterministic=each) for each in (False, True))
    sums = 2 * 4 * 256 * 128 * 4
    assert scratch(repeatable, operation) - scratch(usual, operation) == (factor - 1) * sums
    assert DETERMINISTIC in repeatable.assumptions
    assert DETERMINISTIC not in usual.assumptions


def test_what_torch_was_asked_for_outside_changes_no_prediction() -> None:
    expected = predict(recipe("triton"), use_cache=False)
    torch.use_deterministic_algorithms(True)
    try:
        assert predict(recipe("triton"), use_cache=False) == expected
    finally:
        torch.use_deterministic_algorithms(False)


def test_both_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path))
    made = [ledger_of(recipe("flash"), deterministic=each) for each in (False, True)]
    monkeypatch.setattr("trainfit.prediction.trace.trace", None)  # what is kept is not traced
    kept = [ledger_of(recipe("flash"), deterministic=each) for each in (False, True)]
    assert [each.events for each in kept] == [each.events for each in made]
    assert [each.assumptions for each in kept] == [each.assumptions for each in made]
    assert kept[0].assumptions != kept[1].assumptions


def test_the_workspace_that_it_needs() -> None:
    sizes = []
    for each in (False, True):
        with deterministic_kernels(each):
            sizes.append(
                [cublas_workspace_bytes(GpuTraits.of(gpu(name))) for name in ("h200", "a100-sxm4-80gb")]
            )
    assert sizes == [[32 * 2**20, 8 * 2**20 + 2**17], [32 * 2**20, 32 * 2**20]]


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"model: {{config: {LLAMA!r}, implementation: native}}\n"
        "batch: {micro: 1, seq: 64}\nattention: triton\n"
    )
    for more in ([], ["--deterministic"]):
        assert main(["predict", str(file), "--json", *more]) == 0
        assert ("repeat bit by bit" in capsys.readouterr().out) == bool(more)


def test_train_counts_the_flops_of_the_kernels_that_it_runs() -> None:
    """Two passes execute 7 products in attention's backward, Gluon's kernel 5, in a sweep too.

    The mathematics is the same.
    """
    wanted = recipe("triton", hardware={"gpu": "h200"})
    plain, repeatable = (predict(wanted, deterministic=chosen) for chosen in (False, True))
    assert repeatable.hardware_flops > plain.hardware_flops
    assert repeatable.model_flops == plain.model_flops
    assert step_flops(wanted, "auto", None, deterministic=True)[1] == repeatable.hardware_flops
    for deterministic, expected in ((False, plain), (True, repeatable)):
        request = PartRequest(
            part="train", variant="a", recipe=wanted, device="cpu", timeout_s=1,
            train=TrainPart(deterministic=deterministic),
            model_flops=plain.model_flops, hardware_flops=plain.hardware_flops,
        )  # fmt: skip
        flops = trial._flops(request)
        assert flops is not None
        assert (flops.model_flops, flops.hardware_flops) == (expected.model_flops, expected.hardware_flops)


def files_of_a_trace() -> set[str]:
    """Trace in a process that has torch and none of our modules; return which files it then has."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "trainfit"]:
        del sys.modules[name]
    importlib.import_module("trainfit.prediction.trace").trace(tiny_recipe())
    modules = (module for name, module in sys.modules.items() if name.startswith("trainfit."))
    return {str(module.__file__) for module in modules}


def test_all_code_that_decides_a_ledger_is_part_of_its_key() -> None:
    """What tracing imports: else a ledger of other code would be found."""
    with processes().Pool(1) as pool:
        imported = pool.apply(files_of_a_trace)
    assert imported <= {str(path) for path in cache.sources(cache.NOT_OF_A_LEDGER).values()}


PROGRAM = """
import sys, torch
from trainfit.kernels.determinism import deterministic_kernels
from trainfit.spec.recipe import Recipe
from trainfit.step import assemble
with deterministic_kernels():
    step = assemble(Recipe.model_validate_json(sys.argv[1]), torch.device("cuda"))
    for _ in range(3):
        step(step.random_batches())
print(torch.cuda.max_memory_allocated())
"""


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["triton", "flash"])
def test_the_peak_is_the_predicted_one(attention: str) -> None:
    """In a process of its own; by PyTorch's flash the copies of dQ are in it."""
    wanted = recipe(attention, hardware={"gpu": "h200"})
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, wanted.model_dump_json()],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    calculated = predict(wanted, deterministic=True).peak_allocated_bytes
    other = predict(wanted).peak_allocated_bytes
    assert other != calculated
    assert abs(int(done.stdout) - calculated) < abs(int(done.stdout) - other) / 2
