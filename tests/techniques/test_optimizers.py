"""Optimizers in whole steps: learning, resuming, clipping, sizes by their papers, one-line refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_recipe import tiny_recipe, wide_recipe
from tiny_step import step_of
from trainfit.kernels.quantize.codebook import BLOCK
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Optimizer, Recipe
from trainfit.step import Step, assemble
from trainfit.techniques import registry
from trainfit.training import checkpoint
from virtual_runs import recipe_of, sums, with_layers

CPU = torch.device("cpu")

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
    "sgd-rounded": (
        Optimizer(name="sgd", momentum=0.9, stochastic_rounding=True), lambda shape: stored(2 * shape.numel())
    ),
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
        ({"optimizer": Optimizer(stochastic_rounding=True), "precision": "amp-bf16"},
         "fp32 weights, which lose nothing"),
        ({"optimizer": Optimizer(stochastic_rounding=True, implementation="foreach")}, "rounds to nearest"),
        ({"optimizer": Optimizer(stochastic_rounding=True), "adapter": Adapter(kind="lora")},
         "adapter.dtype: base"),
        ({"optimizer": Optimizer(clip_norm=1.0, in_backward="block")}, "before the norm of all is known"),
        ({"optimizer": Optimizer(in_backward="block"), "batch": Batch(accumulate=2)},
         "nothing would be saved"),
        ({"optimizer": Optimizer(in_backward="block"), "precision": "amp-fp16"},
         "scaler must see every gradient"),
    ],
    ids=str,
)  # fmt: skip
def test_refused_in_one_line(fields: dict[str, Any], words: str):
    with pytest.raises(InputError) as error:
        registry.check(tiny_recipe(**{"precision": "bf16", **fields}))
    assert words in str(error.value)
    assert "\n" not in str(error.value)
