"""Optimizers: low-bit states equal torchao's, rounding keeps what it should, what runs when, and what it all weighs."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tiny_recipe import tiny_recipe
from trainfit.kernels import adamw as kernel
from trainfit.kernels import stochastic_rounding as rounding
from trainfit.kernels.moment_levels import BLOCK, MomentLevels, levels, zeros
from trainfit.kernels.sgd import StochasticSGD
from trainfit.predict.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Optimizer, Recipe
from trainfit.step import Step, assemble
from trainfit.techniques import registry
from trainfit.train import checkpoint
from virtual_runs import recipe_of, steady_sum, sums, with_layers

CPU = torch.device("cpu")
BF16 = torch.bfloat16
NUMBERS = [0.01, 0.001, 0.1, 0.001, 1e-8, 0.19, 0.045]
SIZES = [(7,), (5003,), (40, 96)]
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU the kernels run for real, in the test below"
)


def weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def run(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 6) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        for parameter in parameters:
            parameter.grad = (torch.randn(parameter.shape) / 10**step).to(parameter.dtype)
        optimizer.step()


# -- moments in 8 and 4 bits


@pytest.mark.parametrize(("bits", "signed"), [(8, True), (8, False), (4, True), (4, False)])
def test_levels_are_torchaos(bits: int, signed: bool):
    torchao = pytest.importorskip(f"torchao.optim.subclass_{bits}bit")
    theirs = torchao.get_qmap_signed() if signed else torchao.get_qmap_unsigned()
    assert len(theirs) == 2**bits
    assert levels(bits, signed=signed) == pytest.approx(theirs, rel=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("bits", [8, 4])
def test_low_bit_adamw_is_torchaos(bits: int, dtype: torch.dtype):
    """The same codes, and weights equal to fp32's last bits: a large matrix, one that is too small, a long vector."""
    optim = pytest.importorskip("torchao.optim")
    shapes = ((64, 96), (63,), (4096,))
    ours, theirs = weights(*shapes, dtype=dtype), weights(*shapes, dtype=dtype)
    mine = kernel.FusedAdamW(ours, 0.01, 0.1, levels=MomentLevels(bits, CPU), stochastic=False, seed=0)
    other = getattr(optim, f"AdamW{bits}bit")(theirs, lr=0.01, weight_decay=0.1)
    run(mine, ours)
    with torch.compiler.set_stance("force_eager"):
        run(other, theirs)
    for a, b in zip(ours, theirs, strict=True):
        if a.numel() < 4096 and dtype == BF16:
            continue  # torchao keeps bf16 moments there, we fp32.
        if dtype == BF16:
            # A last bit of fp32 decides now and then which neighbour is the nearer.
            assert (a != b).float().mean() < 2e-3
            torch.testing.assert_close(a, b, rtol=2**-6, atol=0)
        else:
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
        if a.numel() < 4096:
            continue
        for moment in ("exp_avg", "exp_avg_sq"):
            codes = mine.state[a][f"{moment}_codes"]
            assert (codes != other.state[b][moment].codes).float().mean() < 1e-3
            torch.testing.assert_close(mine.state[a][f"{moment}_scales"], other.state[b][moment].scale)


def test_without_codes_it_is_torchs_adamw():
    ours, theirs = weights((40, 24), (24,)), weights((40, 24), (24,))
    run(kernel.FusedAdamW(ours, 0.01, 0.1, stochastic=False, seed=0), ours)
    run(torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1), theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


# -- kernels


@interpreted
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels_in_the_interpreter(size: tuple[int, ...]):
    compare_kernels(size, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [*SIZES, (10800, 2048)], ids=str)
def test_kernels_on_a_gpu(size: tuple[int, ...]):
    compare_kernels(size, "cuda")


def compare_kernels(size: tuple[int, ...], device: str) -> None:
    torch.manual_seed(2)
    p, g = ((torch.randn(size) / 50).to(BF16).to(device) for _ in range(2))
    m, v = torch.zeros_like(p), torch.rand_like(p) / 100
    wide = [t.float() for t in (p, m, v)]
    ours = [t.clone() for t in wide]
    kernel.triton_adamw(ours[0], g, *ours[1:], NUMBERS, False, 0)
    kernel.plain_adamw(wide[0], g, *wide[1:], NUMBERS, False, 0)
    for a, b in zip(ours, wide, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    rounded = [t.clone() for t in (p, m, v)]
    kernel.triton_adamw(rounded[0], g, *rounded[1:], NUMBERS, True, 5)
    for a, b in zip(rounded, wide, strict=True):
        between(a, b)
    total = p.clone()
    rounding.triton_add_rounded(total, g, 0.99, -0.01, 3)
    between(total, p.float() * 0.99 - g.float() * 0.01)
    for bits in (8, 4):
        compare_coded(p, g, bits)


def compare_coded(p: torch.Tensor, g: torch.Tensor, bits: int) -> None:
    """Weights in fp32: Triton's interpreter cuts bf16's bits off instead of rounding to nearest."""
    table = MomentLevels(bits, p.device).table
    ours, plain = [
        [p.float(), *zeros(p.shape, bits, p.device), *zeros(p.shape, bits, p.device)] for _ in range(2)
    ]
    for step in range(3):
        gradient = g / 10**step
        kernel.triton_adamw_coded(ours[0], gradient, *ours[1:], table, NUMBERS, False, 0)
        kernel.plain_adamw_coded(plain[0], gradient, *plain[1:], table, NUMBERS, False, 0)
    for a, b in zip(ours, plain, strict=True):
        if a.dtype == torch.uint8:
            assert (a != b).float().mean() < 1e-3
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    rounded = [p.clone(), *(t.clone() for t in plain[1:])]
    kernel.triton_adamw_coded(rounded[0], g, *rounded[1:], table, NUMBERS, True, 7)
    exact = [p.float(), *plain[1:]]
    kernel.plain_adamw_coded(exact[0], g, *exact[1:], table, NUMBERS, False, 0)
    between(rounded[0], exact[0])


def between(rounded: torch.Tensor, wide: torch.Tensor) -> None:
    """Each is one of the two bf16 neighbours of the fp32 value, and not always the nearer."""
    assert ((rounded.float() - wide).abs() <= wide.abs() * 2**-7).all()
    moved = wide != wide.to(BF16).float()
    if moved.sum() > 1000:
        # The farther neighbour has probability 1/4 on average.
        assert 0.15 < (rounded != wide.to(BF16))[moved].float().mean() < 0.35


# -- stochastic rounding


@pytest.mark.parametrize("share", [0.0, 1 / 64, 0.3, 0.5, 0.9])
@pytest.mark.parametrize(
    "run_sum", [rounding.plain_add_rounded, pytest.param(rounding.triton_add_rounded, marks=interpreted)]
)
def test_a_value_is_rounded_up_as_often_as_it_is_near(share: float, run_sum: Any):
    """A value ``share`` of the way between two neighbours becomes the upper with that probability, exactly."""
    num, ulp = 40_000, 2**-7
    target, update = torch.ones(num, dtype=BF16), torch.full((num,), 1.0, dtype=BF16)
    run_sum(target, update, 1.0, share * ulp, 11)
    ups = (target == 1 + ulp).sum().item()
    assert ups + (target == 1).sum().item() == num
    # The exact probability is of 16 bits; five standard deviations of the binomial.
    expected = round(share * 2**16) / 2**16
    assert abs(ups - num * expected) <= 5 * (num * expected * (1 - expected)) ** 0.5 + 1e-9


MAKERS: dict[str, Any] = {
    "sgd": lambda p, lr, sr: StochasticSGD(p, lr, 0.0, 0.0, seed=1) if sr else torch.optim.SGD(p, lr=lr),
    "sgd-momentum": lambda p, lr, sr: (
        StochasticSGD(p, lr / 10, 0.0, 0.9, seed=1) if sr else torch.optim.SGD(p, lr=lr / 10, momentum=0.9)
    ),
    "adamw": lambda p, lr, sr: (
        kernel.FusedAdamW(p, lr, 0.0, stochastic=True, seed=1) if sr else torch.optim.AdamW(p, lr=lr, weight_decay=0)
    ),
    **{
        f"adamw{bits}bit": lambda p, lr, sr, bits=bits: kernel.FusedAdamW(
            p, lr, 0.0, levels=MomentLevels(bits, CPU), stochastic=sr, seed=1
        )
        for bits in (8, 4)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
def test_a_thousand_updates_below_half_the_last_bit_add_up(name: str):
    """From 2, with a constant gradient of 1: each update is lr = 2^-12, an eighth of half of bf16's last bit there.

    The weight is to move by 1000 lr (SGD with momentum reaches its pace after 10 steps or so). Each rounding errs by at
    most the last bit below 2, 2^-7, with mean 0.
    """

    def moved(stochastic: bool) -> torch.Tensor:
        weight = nn.Parameter(torch.full((4096,), 2.0 - 2**-7, dtype=BF16))
        optimizer = MAKERS[name]([weight], 2**-12, stochastic)
        for _ in range(1000):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return 2.0 - 2**-7 - weight.detach().double()

    assert moved(False).abs().max() == 0
    found, expected = moved(True), 1000 * 2**-12
    # Bernoulli's variance a step is at most lr * ulp; of the mean over 4096 weights, five standard deviations.
    deviation = (1000 * 2**-12 * 2**-7 / 4096) ** 0.5
    slack = 0.012 if name == "sgd-momentum" else 0.004  # What a momentum owes at the end; 8-bit levels.
    assert abs(found.mean() - expected) < 5 * deviation + slack * expected


def test_muons_own_products_are_no_recomputation():
    """They run within the backward, and count for no model FLOPs either."""
    asked = Optimizer(name="muon", momentum=0.95, in_backward=True)
    recipe = recipe_of(with_layers("llama-3.2-1b", 2), precision="bf16", optimizer=asked)
    ledger = trace(recipe)
    assert any(op.is_update and op.causal_flops for op in ledger.ops)
    assert not any(ledger.recomputes(op) for op in ledger.ops)
    again = trace(recipe.model_copy(update={"recompute": "full"}))
    assert any(again.recomputes(op) for op in again.ops)


def test_no_two_optimizers_of_a_step_draw_the_same_bits():
    asked = Optimizer(
        name="muon", momentum=0.95, implementation="fused", stochastic_rounding=True, in_backward=True
    )
    step = assemble(tiny_recipe(precision="bf16", optimizer=asked), torch.device("cpu"))
    numbers = [optimizer._seed for optimizer in step.optimizers]
    assert len({type(optimizer) for optimizer in step.optimizers}) == 2
    assert len(set(numbers)) == len(numbers)


def test_equal_seeds_repeat_and_others_differ():
    runs = []
    for seed in (1, 1, 2):
        parameters = weights((64, 64), (64,), dtype=BF16)
        run(kernel.FusedAdamW(parameters, 0.01, 0.1, stochastic=True, seed=seed), parameters)
        runs.append(torch.cat([p.detach().flatten() for p in parameters]))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


# -- in whole steps


def step_of(seed: int = 0, **fields: Any) -> Step:
    return assemble(tiny_recipe(**{"precision": "bf16", **fields}, seed=seed), CPU)


def wide_recipe(layers: int, **fields: Any) -> Recipe:
    """bf16, native, and wide enough that matrices have codes: 96 x 64 is over 4,096 elements."""
    recipe = tiny_recipe("native", layers, **{"precision": "bf16", **fields})
    config = {**dict(recipe.model.config), "hidden_size": 64, "intermediate_size": 96}  # pyright: ignore
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": config})})


ASKED = {
    "adamw": Optimizer(lr=1e-2, stochastic_rounding=True),
    "adamw8bit": Optimizer(name="adamw8bit", lr=1e-2),
    "adamw4bit-rounded": Optimizer(name="adamw4bit", lr=1e-2, stochastic_rounding=True),
    "sgd-rounded": Optimizer(name="sgd", lr=0.1, momentum=0.9, stochastic_rounding=True),
    "adafactor-rounded": Optimizer(name="adafactor", lr=0.05, stochastic_rounding=True),
    "muon": Optimizer(name="muon", lr=1e-2),
    "muon-rounded": Optimizer(name="muon", lr=1e-2, stochastic_rounding=True),
}


@pytest.mark.parametrize("in_backward", [False, True, "block"])
@pytest.mark.parametrize("name", ASKED)
def test_it_learns_and_resumes_to_the_last_bit(name: str, in_backward: Any, tmp_path: Path):
    recipe = wide_recipe(2, optimizer=ASKED[name].model_copy(update={"in_backward": in_backward}))
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


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "adamw8bit", "muon"])
def test_updating_by_block_is_the_ordinary_update(name: Any):
    asked = Optimizer(name=name, lr=1e-2)
    ordinary, hooked = (
        step_of(optimizer=asked.model_copy(update={"in_backward": when}), precision="fp32")
        for when in (False, "block")
    )
    for index in range(3):
        assert hooked(hooked.random_batches(index)).item() == pytest.approx(
            ordinary(ordinary.random_batches(index)).item(), rel=1e-6
        )
    for a, b in zip(hooked.model.parameters(), ordinary.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    # Two blocks; embedding, head and last norm each by itself. Muon has two kinds in a block.
    assert len(hooked.optimizers) == 2 * (2 if name == "muon" else 1) + 3
    assert all(parameter.grad is None for parameter in hooked.model.parameters())


def test_a_block_is_updated_when_its_last_gradient_has_come_and_not_before():
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


def test_what_backward_does_not_reach_keeps_nothing_waiting():
    step = step_of(optimizer=Optimizer(name="sgd", lr=0.1, in_backward="block"), precision="fp32")
    norm: Any = step.model.get_submodule("model.layers.0.input_layernorm")
    before = step.model.get_parameter("model.layers.0.mlp.up_proj.weight").detach().clone()
    norm.forward = lambda x: x  # Its weight gets no gradient.
    step(step.random_batches())
    assert not torch.equal(before, step.model.get_parameter("model.layers.0.mlp.up_proj.weight"))
    assert all(parameter.grad is None for parameter in step.model.parameters())


# -- Muon


def test_muon_takes_the_blocks_matrices_and_adamw_the_rest():
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


def test_newton_schulz_is_hardware_flops_and_no_model_flops():
    """Five steps of three products, for n x m with n <= m: 4 n^2 m + 2 n^3 each."""
    control = wide_recipe(2)
    # qkv, attention's output, gate and up in one, down.
    a_block = [(64, 128), (64, 64), (64, 192), (64, 96)]
    expected = 2 * 5 * sum(4 * n * n * m + 2 * n**3 for n, m in a_block)
    plain = trace(control)
    for in_backward in (False, "block"):
        muon = control.model_copy(update={"optimizer": Optimizer(name="muon", in_backward=in_backward)})
        other = trace(muon)
        assert steady_sum(other, "flops") - steady_sum(plain, "flops") == expected
        assert steady_sum(other, "model_flops") == steady_sum(plain, "model_flops")


# -- clipping


@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-fp16"])
def test_clipping_scales_all_gradients_to_the_norm(precision: Any):
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


# -- on the virtual GPU


CASES: dict[str, dict[str, Any]] = {
    "adamw8bit-clipped": {"optimizer": Optimizer(name="adamw8bit", clip_norm=1.0)},
    "adamw4bit-by-block": {
        "optimizer": Optimizer(name="adamw4bit", stochastic_rounding=True, in_backward="block"),
        "recompute": "full",
    },
    "sgd-rounded-in-backward": {
        "optimizer": Optimizer(name="sgd", momentum=0.9, stochastic_rounding=True, in_backward=True)
    },
    "muon-rounded-by-block": {
        "optimizer": Optimizer(name="muon", stochastic_rounding=True, in_backward="block")
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_few_layers_tell_the_whole(case: str):
    recipe = wide_recipe(5, **CASES[case])
    repeated, whole = trace(recipe), trace(recipe, whole=True)
    assert repeated.repeat == 3
    assert sums(repeated) == sums(whole)
    assert repeated.ops_without_flops == ()


def shapes_of(recipe: Recipe) -> list[torch.Size]:
    with torch.device("meta"):
        model = assemble(
            recipe.model_copy(update={"optimizer": Optimizer(name="sgd")}), torch.device("meta")
        ).model
    return [parameter.shape for parameter in model.parameters()]


def stored(num_bytes: int) -> int:
    return -(-num_bytes // 512) * 512


STATE: dict[str, tuple[Optimizer, Any]] = {
    # Per moment: a byte or half of one an element, and 4 bytes a block; small tensors 4 bytes an element.
    **{
        f"adamw{bits}bit": (
            Optimizer(name=f"adamw{bits}bit"),  # pyright: ignore
            lambda shape, bits=bits: 2
            * (
                stored(4 * shape.numel())
                if shape.numel() < 4096
                else stored(-(-shape.numel() * bits // 8)) + stored(4 * -(-shape.numel() // BLOCK[bits]))
            ),
        )
        for bits in (8, 4)
    },
    "adamw-rounded": (Optimizer(stochastic_rounding=True), lambda shape: 2 * stored(2 * shape.numel())),
    "sgd-rounded": (Optimizer(name="sgd", momentum=0.9, stochastic_rounding=True), lambda shape: stored(2 * shape.numel())),
}  # fmt: skip


@pytest.mark.parametrize("name", STATE)
@pytest.mark.parametrize("model", ["gpt2", "llama-3.2-1b"])
def test_state_weighs_what_the_papers_say(name: str, model: str):
    asked, expected = STATE[name]
    recipe = recipe_of(with_layers(model, 4), optimizer=asked)
    ledger = trace(recipe)
    found = sum(
        stored(s.num_bytes) * (ledger.repeat if s.group == 1 else 1)
        for s in ledger.storages
        if s.category == "optimizer"
    )
    assert found == sum(expected(shape) for shape in shapes_of(recipe))


# -- refusals


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"optimizer": Optimizer(name="adamw8bit", implementation="foreach")}, "one kernel a weight"),
        ({"optimizer": Optimizer(name="adamw4bit", momentum=0.9)}, "always keeps a first moment"),
        ({"optimizer": Optimizer(name="muon", momentum=0.0)}, "works on a momentum"),
        ({"optimizer": Optimizer(stochastic_rounding=True), "precision": "amp-bf16"}, "fp32 weights, which lose nothing"),
        ({"optimizer": Optimizer(stochastic_rounding=True, implementation="foreach")}, "rounds to nearest"),
        ({"optimizer": Optimizer(stochastic_rounding=True), "adapter": Adapter(kind="lora")}, "adapter.dtype: base"),
        ({"optimizer": Optimizer(clip_norm=1.0, in_backward="block")}, "before the norm of all is known"),
        ({"optimizer": Optimizer(in_backward="block"), "batch": Batch(accumulate=2)}, "nothing would be saved"),
        ({"optimizer": Optimizer(in_backward="block"), "precision": "amp-fp16"}, "scaler must see every gradient"),
    ],
    ids=str,
)  # fmt: skip
def test_refused_in_one_line(fields: dict[str, Any], words: str):
    with pytest.raises(InputError) as error:
        registry.check(tiny_recipe(**{"precision": "bf16", **fields}))
    assert words in str(error.value)
    assert "\n" not in str(error.value)
