"""Optimizers in whole steps: learning, resuming, updates in the backward, clipping, Muon, state sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_recipe import tiny_recipe, wide_recipe
from tiny_step import step_of
from trainfit.kernels.quantize.codebook import BLOCK
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Hardware, Optimizer
from trainfit.step import Step, assemble
from trainfit.training import checkpoint
from virtual_runs import recipe_of, steady_sum, sums, with_layers

CPU = torch.device("cpu")

LEARNING: dict[str, tuple[Any, Optimizer]] = {
    "adamw-rounded": (False, Optimizer(lr=1e-2, stochastic_rounding=True)),
    "adamw-triton": (False, Optimizer(lr=1e-2, implementation="triton")),
    "adamw8bit": (True, Optimizer(name="adamw8bit", lr=1e-2)),
    "adamw4bit-rounded": ("block", Optimizer(name="adamw4bit", lr=1e-2, stochastic_rounding=True)),
    "sgd-rounded": (True, Optimizer(name="sgd", lr=0.1, momentum=0.9, stochastic_rounding=True)),
    "adafactor-rounded": ("block", Optimizer(name="adafactor", lr=0.05, stochastic_rounding=True)),
    "adafactor-absolute": (
        False,
        Optimizer(name="adafactor", implementation="fused", lr=1e-2, scale_parameter=False),
    ),
    "adafactor-transformers": (False, Optimizer(name="adafactor", lr=1e-2, scale_parameter=False)),
    "muon": (False, Optimizer(name="muon", lr=1e-2)),
    "muon-rounded": ("block", Optimizer(name="muon", lr=1e-2, stochastic_rounding=True)),
}


@pytest.mark.parametrize("name", LEARNING)
def test_it_learns_and_resumes_to_the_last_bit(name: str, tmp_path: Path) -> None:
    in_backward, optimizer = LEARNING[name]
    recipe = wide_recipe(2, optimizer=optimizer.model_copy(update={"in_backward": in_backward}))
    straight = assemble(recipe, CPU)
    batches = straight.random_batches()
    losses = [straight(batches).item() for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1
    saved = checkpoint.save(tmp_path, straight, checkpoint.Progress(8, losses[-1]), {}, keep=1)
    expected = [straight(batches).item() for _ in range(3)]
    resumed = assemble(recipe, CPU)
    checkpoint.load(saved, resumed)
    assert [resumed(batches).item() for _ in range(3)] == expected
    for a, b in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_implementation_is_explicit(name: Any) -> None:
    """torch's default depends on the device."""
    flags = []
    for implementation in ("forloop", "foreach", "fused"):
        (optimizer,) = assemble(
            tiny_recipe(optimizer=Optimizer(name=name, implementation=implementation)), CPU
        ).optimizers
        flags.append((optimizer.defaults["foreach"], optimizer.defaults["fused"]))
    assert flags == [(False, False), (True, False), (False, True)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adamw_of_one_kernel_a_weight_is_torchs(precision: Any) -> None:
    """Computed in fp32 and rounded to nearest, both of them."""
    steps = [
        step_of(optimizer=Optimizer(lr=1e-2, implementation=one), precision=precision)
        for one in ("fused", "triton")
    ]
    for index in range(3):
        losses = [step(step.random_batches(index)).item() for step in steps]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6 if precision == "fp32" else 1e-3)
    for theirs, ours in zip(*(step.model.parameters() for step in steps), strict=True):
        off = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert off < (1e-6 if precision == "fp32" else 2e-3)


def test_the_kernel_is_adamws_and_needs_triton() -> None:
    with pytest.raises(InputError, match="optimizer.implementation = 'triton'.*use fused"):
        recipe_from({"model": {"config": "gpt2"}, "optimizer": {"name": "sgd", "implementation": "triton"}})
    old = tiny_recipe(optimizer=Optimizer(implementation="triton"), hardware=Hardware(gpu="v100-sxm2-32gb"))
    with pytest.raises(InputError, match="Triton, in which the update is written"):
        assemble(old, CPU)


def test_adafactor_keeps_a_row_and_a_column_and_with_momentum_a_whole_moment() -> None:
    """Sizes from the paper's Algorithm 4: n + m of an n x m matrix; with beta1, n x m more, here fp32."""
    states = []
    for momentum in (0.0, 0.9):
        step = step_of(optimizer=Optimizer(name="adafactor", momentum=momentum))
        step(step.random_batches())
        weight = step.model.get_parameter("model.layers.0.mlp.gate_proj.weight")
        states.append(step.optimizers[0].state[weight])
    plain, moved = states
    assert sorted(value.numel() for value in plain.values()) == [1, 32, 64]
    assert moved["exp_avg"].shape == (64, 32)
    assert moved["exp_avg"].dtype == torch.float32


# -- in the backward


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "adamw8bit", "muon"])
def test_updating_in_the_backward_is_the_ordinary_update(name: Any) -> None:
    optimizer = Optimizer(name=name, lr=1e-2)
    steps = [
        step_of(optimizer=optimizer.model_copy(update={"in_backward": when}), precision="fp32")
        for when in (False, True, "block")
    ]
    for index in range(3):
        losses = [step(step.random_batches(index)).item() for step in steps]
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    for parameters in zip(*(step.model.parameters() for step in steps), strict=True):
        for hooked in parameters[1:]:
            torch.testing.assert_close(hooked, parameters[0], rtol=1e-5, atol=1e-6)
            assert hooked.grad is None
    # One a weight. By block: two blocks; embedding, head and last norm alone; Muon has two kinds in a block.
    kinds = 2 if name == "muon" else 1
    num_weights = len(list(steps[0].model.parameters()))
    assert [len(step.optimizers) for step in steps] == [kinds, num_weights, 2 * kinds + 3]


def test_a_block_is_updated_when_its_last_gradient_has_come_and_not_before() -> None:
    step = step_of(optimizer=Optimizer(in_backward="block"))
    blocks = step.model.get_submodule("model.layers")
    held: list[int] = []

    def count(_: torch.Tensor) -> None:
        held.append(sum(p.grad is not None for p in step.model.parameters()))

    for parameter in blocks[0].parameters():  # pyright: ignore
        parameter.register_post_accumulate_grad_hook(count)
    step(step.random_batches())
    # Block 1 and the head are updated by then; the hook that comes last here sees none of block 0's left.
    assert held == [1, 2, 3, 4, 5, 6, 7, 8, 0]


def test_what_backward_does_not_reach_keeps_nothing_waiting() -> None:
    step = step_of(optimizer=Optimizer(name="sgd", lr=0.1, in_backward="block"), precision="fp32")
    norm: Any = step.model.get_submodule("model.layers.0.input_layernorm")
    before = step.model.get_parameter("model.layers.0.mlp.up_proj.weight").detach().clone()
    norm.forward = lambda x: x  # Its weight gets no gradient.
    step(step.random_batches())
    assert not torch.equal(before, step.model.get_parameter("model.layers.0.mlp.up_proj.weight"))
    assert all(parameter.grad is None for parameter in step.model.parameters())


# -- clipping


@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-fp16"])
def test_clipping_scales_all_gradients_to_the_norm(precision: Any) -> None:
    def gradients(clip_norm: float | None) -> tuple[Step, list[torch.Tensor]]:
        step = step_of(precision=precision, optimizer=Optimizer(name="sgd", clip_norm=clip_norm))
        found: list[torch.Tensor] = []
        step.optimizers[0].register_step_pre_hook(
            lambda *_: found.extend(p.grad.double() for p in step.model.parameters() if p.grad is not None)
        )
        step(step.random_batches())
        return step, found

    loose_step, loose = gradients(1e6)
    norm = loose_step.readings["gradient_norm"]
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(torch.stack([g.norm() for g in loose]).norm().item(), rel=1e-5)
    if precision != "amp-fp16":  # There, what is not clipped is not unscaled when the optimizer is called.
        assert all(torch.equal(a, b) for a, b in zip(gradients(None)[1], loose, strict=True))
    clipped_step, clipped = gradients(0.01)
    assert clipped_step.readings["gradient_norm"].item() == norm.item()
    assert torch.stack([g.norm() for g in clipped]).norm().item() == pytest.approx(0.01, rel=5e-3)


# -- Muon


def test_muon_takes_the_blocks_matrices_and_adamw_the_rest() -> None:
    step = step_of(optimizer=Optimizer(name="muon"))
    muon, adamw = step.optimizers
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    names = {id(p): name for name, p in step.model.named_parameters()}
    by_muon = {names[id(p)] for p in muon.param_groups[0]["params"]}
    assert len(by_muon) == 2 * 7
    assert all(".layers." in name and "norm" not in name for name in by_muon)
    assert {names[id(p)] for p in adamw.param_groups[0]["params"]} == set(names.values()) - by_muon
    assert muon.defaults["momentum"] == 0.95


def test_newton_schulz_is_hardware_flops_no_model_flops_and_no_recomputation() -> None:
    """Five steps of three products, for n x m with n <= m: 4 n^2 m + 2 n^3 each."""
    control = wide_recipe(2)
    # qkv, attention's output, gate and up in one, down.
    a_block = [(64, 128), (64, 64), (64, 192), (64, 96)]
    expected = 2 * 5 * sum(4 * n * n * m + 2 * n**3 for n, m in a_block)
    plain = trace(control)
    for in_backward in (False, "block"):
        muon = control.model_copy(update={"optimizer": Optimizer(name="muon", in_backward=in_backward)})
        ledger = trace(muon)
        assert steady_sum(ledger, "flops") - steady_sum(plain, "flops") == expected
        assert steady_sum(ledger, "model_flops") == steady_sum(plain, "model_flops")
        assert not any(ledger.recomputes(op) for op in ledger.ops)
    assert any(op.is_update and op.causal_flops for op in ledger.ops)
    again = trace(muon.model_copy(update={"recompute": "full"}))
    assert any(again.recomputes(op) for op in again.ops)


# -- on the virtual GPU


CASES: dict[str, dict[str, Any]] = {
    "adamw8bit-clipped": {"optimizer": Optimizer(name="adamw8bit", clip_norm=1.0)},
    "adamw4bit-by-block": {
        "optimizer": Optimizer(name="adamw4bit", stochastic_rounding=True, in_backward="block"),
        "recompute": "full",
    },
    "muon-rounded-in-backward": {
        "optimizer": Optimizer(name="muon", stochastic_rounding=True, in_backward=True)
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_few_layers_stand_for_all(case: str) -> None:
    recipe = wide_recipe(5, **CASES[case])
    repeated, whole = trace(recipe), trace(recipe, whole=True)
    assert repeated.repeat == 3
    assert sums(repeated) == sums(whole)
    assert repeated.ops_without_flops == ()


def stored(num_bytes: int) -> int:
    return -(-num_bytes // 512) * 512


def low_bit_moment(numel: int, bits: int) -> int:
    """A byte or half of one an element and 4 bytes a block; small tensors 4 bytes an element."""
    if numel < 4096:
        return stored(4 * numel)
    return stored(-(-numel * bits // 8)) + stored(4 * -(-numel // BLOCK[bits]))


@pytest.mark.parametrize(
    ("fields", "state_bytes"),
    [
        ({"name": "adamw8bit"}, lambda numel: 2 * low_bit_moment(numel, 8)),
        ({"name": "adamw4bit"}, lambda numel: 2 * low_bit_moment(numel, 4)),
        ({"stochastic_rounding": True}, lambda numel: 2 * stored(2 * numel)),
        ({"name": "sgd", "momentum": 0.9, "stochastic_rounding": True}, lambda numel: stored(2 * numel)),
    ],
    ids=["adamw8bit", "adamw4bit", "adamw-rounded", "sgd-rounded"],
)
def test_state_weighs_what_the_papers_say(fields: dict[str, Any], state_bytes: Any) -> None:
    recipe = recipe_of(with_layers("gpt2", 4), optimizer=Optimizer(**fields))
    ledger = trace(recipe)
    found = sum(
        stored(s.num_bytes) * (ledger.repeat if s.group == 1 else 1)
        for s in ledger.storages
        if s.category == "optimizer"
    )
    meta = torch.device("meta")
    with meta:
        model = assemble(recipe.model_copy(update={"optimizer": Optimizer(name="sgd")}), meta).model
    assert found == sum(state_bytes(parameter.numel()) for parameter in model.parameters())


def test_only_adafactor_has_steps_that_may_be_absolute() -> None:
    with pytest.raises(InputError, match=r"optimizer\.scale_parameter.*only Adafactor"):
        recipe_from({"model": {"config": "gpt2"}, "optimizer": {"scale_parameter": False}})
    absolute = {"name": "adafactor", "scale_parameter": False}
    scaled = recipe_from({"model": {"config": "gpt2"}, "optimizer": {"name": "adafactor"}})
    assert recipe_from({"model": {"config": "gpt2"}, "optimizer": absolute}).id != scaled.id
