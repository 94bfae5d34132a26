"""bf16-master and fp16-master: 16-bit weights in compute, fp32 master weights and moments in the update."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_runs import BF16, interpreted, weights
from tiny_recipe import tiny_recipe, wide_recipe
from trainfit.optim import adamw
from trainfit.optim.loss_scaler import HalfGradScaler
from trainfit.prediction.trace import trace
from trainfit.report.precision import meaning
from trainfit.spec.recipe import Hardware, Offload, Optimizer, Parallel
from trainfit.step import assemble
from trainfit.training import checkpoint
from trainfit.training.state import optimizer_state
from virtual_runs import sums

CPU = torch.device("cpu")
MASTER: dict[str, Any] = {"precision": "bf16-master"}
NUMBERS = [0.01, 0.001, 0.1, 0.001, 1e-8, 0.19, 0.045]


def test_the_update_is_torchs_adamw_of_fp32_weights() -> None:
    """Given the same bf16 gradients; the model's weights are the master weights, rounded."""
    ours, wide = weights((40, 24), (24,), dtype=BF16), weights((40, 24), (24,), dtype=BF16)
    theirs = [torch.nn.Parameter(one.detach().float()) for one in wide]
    mine = adamw.FusedAdamW(ours, 1e-3, 0.1, master=True, seed=0)
    other = torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.1, foreach=False)
    for step in range(20):
        torch.manual_seed(step)
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape).to(BF16)
            b.grad = a.grad.float()
        mine.step()
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        state = mine.state[a]
        assert state.keys() == {"step", "master", "exp_avg", "exp_avg_sq"}
        assert all(state[name].dtype == torch.float32 for name in state)
        torch.testing.assert_close(state["master"], b.detach(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(state["exp_avg_sq"], other.state[b]["exp_avg_sq"], rtol=1e-6, atol=1e-9)
        assert torch.equal(a, state["master"].to(BF16))


def test_small_updates_are_not_lost() -> None:
    """Ten updates of 2^-12 of a weight move it by 2^-9; rounded to bf16 one by one they move nothing."""
    moved = []
    for master in (True, False):
        parameter = torch.nn.Parameter(torch.full((64,), 1.0, dtype=BF16))
        optimizer = adamw.FusedAdamW([parameter], 2**-12, 0.0, master=master, seed=0)
        for _ in range(40):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        moved.append(1.0 - parameter[0].item())
    assert moved == [pytest.approx(40 * 2**-12, rel=0.25), 0.0]


@interpreted
@pytest.mark.parametrize("size", [(7,), (5003,), (40, 96)], ids=str)
def test_the_kernel_in_the_interpreter(size: tuple[int, ...]) -> None:
    compare_kernels(size, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(7,), (5003,), (10800, 2048)], ids=str)
def test_the_kernel_on_a_gpu(size: tuple[int, ...]) -> None:
    compare_kernels(size, "cuda")


def compare_kernels(size: tuple[int, ...], device: str) -> None:
    """The interpreter truncates bf16, so there weight and gradient are fp32."""
    torch.manual_seed(2)
    dtype = BF16 if device == "cuda" else torch.float32
    p, g = ((torch.randn(size) / 50).to(dtype).to(device) for _ in range(2))
    expected = [p, p.float(), torch.zeros_like(p, dtype=torch.float32), torch.rand(size).to(device) / 100]
    found = [t.clone() for t in expected]
    for update, (weight, master, m, v) in (
        (adamw.triton_adamw_master, found), (adamw.plain_adamw_master, expected)
    ):  # fmt: skip
        update(weight, g, master, m, v, NUMBERS, 2.0**-3)
    for a, b in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert torch.equal(found[0], found[1].to(dtype))


@pytest.mark.parametrize("in_backward", [False, True, "block"])
def test_it_learns_and_resumes_to_the_last_bit(in_backward: Any, tmp_path: Path) -> None:
    recipe = wide_recipe(2, optimizer=Optimizer(lr=1e-2, in_backward=in_backward), **MASTER)
    straight = assemble(recipe, CPU)
    batches = straight.random_batches()
    losses = [straight(batches).item() for _ in range(6)]
    assert losses[-1] < losses[0] - 0.1
    saved = checkpoint.save(tmp_path, straight, checkpoint.Progress(6, losses[-1]), {}, keep=1)
    resumed = assemble(recipe, CPU)
    checkpoint.load(saved, resumed)
    (before, _), (after, _) = optimizer_state(straight), optimizer_state(resumed)
    masters = [name for name in before if name.endswith("/master")]
    assert len(masters) == len(list(straight.model.parameters()))
    assert all(
        before[name].dtype == torch.float32 and torch.equal(before[name], after[name]) for name in masters
    )
    expected = [straight(batches).item() for _ in range(3)]
    assert [resumed(batches).item() for _ in range(3)] == expected


def test_master_weights_are_offloaded_with_the_weights() -> None:
    optimizer = Optimizer(lr=1e-2, in_backward="block")
    recipe = tiny_recipe(layers=5, recompute="full", optimizer=optimizer, **MASTER)
    plain = assemble(recipe, CPU)
    moved = assemble(recipe.model_copy(update={"offload": Offload(weights=True)}), CPU)
    moved.load_state_dict(plain.state_dict())
    for seed in range(3):
        assert moved(moved.random_batches(seed)).item() == plain(plain.random_batches(seed)).item()


def test_bytes_a_parameter() -> None:
    """2 for the weight, 12 for its state, and one pass: 2 + 3 x 4 bytes read, as many written."""
    recipe = wide_recipe(4, **MASTER)
    ledger, plain = trace(recipe), trace(wide_recipe(4))
    numel = ledger.params
    held, before = sums(ledger)["breakdown"], sums(plain)["breakdown"]
    assert held["weights"] == before["weights"]
    assert held["optimizer"] - before["optimizer"] == pytest.approx(8 * numel, rel=0.02)
    updates = [op for op in ledger.ops if op.name == "trainfit.adamw_master_.default"]
    assert sum(ledger.times(op) * op.num_bytes for op in updates) == 2 * 28 * numel  # Of two steps.
    assert ledger.ops_without_flops == ()
    assert meaning(recipe) == (
        "bf16-master: bf16 weights, fp32 master and moments, 16 B a parameter: weights 2 B, gradients 2 B, "
        "master weights 4 B, AdamW moments 4 + 4 B"
    )


def test_gradients_under_the_range_of_fp16_reach_the_master_weights() -> None:
    """Scaled by 2^16, 2^-28 is stored; unscaled in fp16, whose least value is 2^-24, it would be 0."""
    parameter = torch.nn.Parameter(torch.ones(64, dtype=torch.float16))
    optimizer = adamw.FusedAdamW([parameter], 2**-12, 0.0, master=True, seed=0)
    scaler = HalfGradScaler("cpu", init_scale=2.0**16)
    scaler.scale(torch.ones(()))
    parameter.grad = torch.full_like(parameter, 2.0**-12)
    scaler.step(optimizer)
    assert optimizer.state[parameter]["exp_avg"][0].item() == pytest.approx(0.1 * 2**-28)
    assert optimizer.state[parameter]["exp_avg_sq"][0].item() == pytest.approx(0.001 * 2**-56, rel=1e-4)
    assert parameter.grad[0].item() == 2.0**-12  # Still scaled.
    scaler.update()
    parameter.grad = torch.full_like(parameter, torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert optimizer.state[parameter]["step"].item() == 1
    parameter.grad = torch.full_like(parameter, 2.0**-12)
    scaler.unscale_(optimizer)  # In place, as for clipping.
    assert parameter.grad[0].item() == 0.0


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_in_fp16_it_learns_as_in_bf16(clip_norm: float | None) -> None:
    ends = []
    for precision in ("fp16-master", "bf16-master", "amp-fp16"):
        optimizer = Optimizer(lr=1e-2, clip_norm=clip_norm)
        step = assemble(wide_recipe(2, precision=precision, optimizer=optimizer), CPU)
        weight = next(iter(step.model.parameters()))
        assert str(weight.dtype)[6:] == {"fp16-master": "float16", "bf16-master": "bfloat16"}.get(
            precision, "float32"
        )
        batches = step.random_batches()
        ends.append([step(batches).item() for _ in range(8)][-1])
    assert max(ends) - min(ends) < 0.05


@pytest.mark.parametrize("precision", ["fp16-master", "fp16-pure"])
def test_fp16_takes_the_memory_of_bf16_and_the_scaler(precision: Any) -> None:
    """The peaks differ by less than 4 KiB: the scale, its counter, and one flag of an overflow."""
    other: Any = {"fp16-master": "bf16-master", "fp16-pure": "bf16"}[precision]
    half, bf16 = (trace(wide_recipe(2, precision=one)) for one in (precision, other))
    found, expected = sums(half)["breakdown"], sums(bf16)["breakdown"]
    assert found["weights"] == expected["weights"]
    assert found["optimizer"] == expected["optimizer"]
    scaler = [op.name for op in half.ops if "amp" in op.name]
    assert {
        "aten._amp_foreach_non_finite_check_and_unscale_.default",
        "aten._amp_update_scale_.default",
    } <= set(scaler)
    peaks = [sums(one)["peak_allocated_bytes"] for one in (half, bf16)]
    assert 0 <= peaks[0] - peaks[1] < 4096


def test_an_overflow_skips_the_update_of_every_part() -> None:
    """Also before any state exists, with the state on the host, where each part has its optimizer."""
    recipe = wide_recipe(3, optimizer=Optimizer(lr=1e-2), precision="fp16-master")
    step = assemble(recipe.model_copy(update={"offload": Offload(optimizer=True)}), CPU)
    assert step.scaler is not None
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    spoiled = next(iter(step.model.parameters())).register_hook(lambda g: torch.full_like(g, torch.inf))
    batches = step.random_batches()
    step(batches)
    assert step.scaler.get_scale() == 2.0**15
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    spoiled.remove()
    first = step(batches).item()
    assert step(batches).item() < first
    assert not any(hasattr(one, "found_inf") for one in step.optimizers)


def test_a_scaled_step_resumes_to_the_last_bit(tmp_path: Path) -> None:
    recipe = wide_recipe(2, optimizer=Optimizer(lr=1e-2), precision="fp16-master")
    straight = assemble(recipe, CPU)
    batches = straight.random_batches()
    losses = [straight(batches).item() for _ in range(4)]
    saved = checkpoint.save(tmp_path, straight, checkpoint.Progress(4, losses[-1]), {}, keep=1)
    resumed = assemble(recipe, CPU)
    checkpoint.load(saved, resumed)
    assert [resumed(batches).item() for _ in range(3)] == [straight(batches).item() for _ in range(3)]


def test_with_fsdp2_it_is_mixed_bf16() -> None:
    """The shards are fp32, so the same step is traced, for any optimizer."""
    two = {"hardware": Hardware(count=2), "optimizer": Optimizer(name="adamw8bit")}
    master, mixed = (wide_recipe(3, precision=one, **two) for one in ("bf16-master", "mixed-bf16"))
    assert sums(trace(master)) == sums(trace(mixed))
    assert "fp32 shards 4 B, gathered in bf16" in meaning(master)


@pytest.mark.parametrize(
    "parallel", [Parallel(tensor=2), Parallel(strategy="ddp"), Parallel(strategy="zero1")], ids=str
)
def test_with_whole_or_tensor_parallel_weights_the_optimizer_keeps_them(parallel: Parallel) -> None:
    recipe = tiny_recipe(layers=3, hardware=Hardware(count=2), parallel=parallel, **MASTER)
    ledger = trace(recipe)
    updates = [op for op in ledger.ops if op.name == "trainfit.adamw_master_.default"]
    share = 28 * 2 * ledger.params / sum(ledger.times(op) * op.num_bytes for op in updates)
    assert share == pytest.approx(1 if parallel.strategy == "ddp" else 2, rel=0.3)
