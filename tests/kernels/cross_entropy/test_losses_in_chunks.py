"""What is true of both losses from hidden states, ``chunked`` and ``fused``: they train as the standard loss
does, or refuse.

What each computes, and in how much memory, is in test_chunked_loss.py and test_fused_loss.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from loss_runs import LORA, family_recipe, gradients, inputs
from tiny_recipe import tiny_recipe
from trainfit.kernels.cross_entropy.chunked import Head, linear_cross_entropy
from trainfit.kernels.cross_entropy.fused import fused_linear_cross_entropy
from trainfit.models.language_head import PLAIN, SCALED, SOFT_CAPPED
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Optimizer, Recipe
from trainfit.step import assemble
from trainfit.techniques import registry
from virtual_runs import recipe_of

CPU = torch.device("cpu")
LOSSES = ("chunked", "fused")
Loss = Callable[[Tensor, Head, Tensor], Tensor]

# -- the functions


@pytest.fixture(params=[linear_cross_entropy, fused_linear_cross_entropy], ids=LOSSES)
def loss_of(request: pytest.FixtureRequest) -> Loss:
    return request.param


def test_what_needs_no_gradient_gets_none(loss_of: Loss):
    hidden, weight, _, targets = inputs(torch.float32)
    loss_of(hidden, Head(weight.detach()), targets).backward()
    assert hidden.grad is not None
    with torch.no_grad():
        assert not loss_of(hidden, Head(weight), targets).requires_grad


def test_tokens_that_are_all_ignored_have_no_loss_and_move_nothing(loss_of: Loss):
    hidden, weight, _, targets = inputs(torch.float32)
    loss = loss_of(hidden, Head(weight), torch.full_like(targets, -100))
    assert loss.isnan()
    loss.backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_a_second_backward_is_refused(loss_of: Loss):
    hidden, weight, _, targets = inputs(torch.float32)
    loss = loss_of(hidden, Head(weight), targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="first backward"):
        loss.backward()


@pytest.mark.parametrize("run", [linear_cross_entropy, fused_linear_cross_entropy], ids=LOSSES)
def test_the_sum_over_chunks_is_rounded_once(run: Any):
    """32 chunks: as near to fp64 as one fp32 number can be, and what its own rows' roundings come to."""
    errors = []
    for seed in range(20):
        torch.manual_seed(seed)
        hidden, weight, targets = torch.randn(512, 16), torch.randn(99, 16) / 4, torch.randint(99, (512,))
        exact = run(hidden.double(), Head(weight.double()), targets)
        errors.append((run(hidden, Head(weight), targets, rows=16).double() / exact - 1).abs().item())
    assert max(errors) < torch.finfo(torch.float32).eps
    assert sum(errors) / 20 < 0.5 * torch.finfo(torch.float32).eps


# -- models

FAMILIES = [
    *(("chunked", family) for family in sorted(PLAIN | SOFT_CAPPED | SCALED.keys())),
    *(("fused", family) for family in ("llama", "gemma2", "cohere", "granite", "gpt2", "qwen3_moe")),
]


@pytest.mark.parametrize(("loss", "family"), FAMILIES)
def test_every_known_family_has_its_own_loss(loss: str, family: str):
    (expected, usual_grads), (found, grads) = (
        gradients(assemble(family_recipe(family, each), CPU)) for each in ("standard", loss)
    )
    assert found == pytest.approx(expected, rel=2e-6)
    assert grads.keys() == usual_grads.keys()
    for name, grad in usual_grads.items():
        assert (grads[name] - grad).norm() <= 1e-4 * grad.norm() + 1e-7, name


FIELDS: list[dict[str, Any]] = [
    {},
    {"precision": "amp-bf16"},
    {"precision": "amp-fp16"},
    {"batch": Batch(micro=2, seq=16, accumulate=3)},
    {"batch": Batch(micro=2, seq=16, accumulate=3), "precision": "amp-fp16"},
    {"adapter": LORA},
    {"recompute": "full"},
    {"optimizer": Optimizer(name="sgd", in_backward=True)},
]


@pytest.mark.parametrize("code", ["hf", "native"])
@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_they_train_as_the_standard_loss_does(fields: dict[str, Any], code: Any):
    expected, *runs = (
        [step(step.random_batches(index)).item() for index in range(3)]
        for loss in ("standard", *LOSSES)
        for step in [assemble(tiny_recipe(code, loss=loss, **fields), CPU)]
    )
    for found in runs:
        assert found == pytest.approx(expected, rel=2e-3 if "amp" in str(fields) else 1e-5)


# -- what is refused

BALANCED = {
    "model_type": "qwen3_moe", "num_hidden_layers": 1, "output_router_logits": True, "hidden_size": 32,
    "moe_intermediate_size": 8, "num_experts": 4, "vocab_size": 97,
}  # fmt: skip


def refused(loss: Any) -> dict[str, tuple[Recipe, str]]:
    """Recipes, and words of the refusal."""
    head = Adapter(kind="lora", targets=("lm_head",))
    return {
        "head adapted": (tiny_recipe(loss=loss, adapter=head), "no(t)? a? ?plain.*use loss: standard"),
        "family": (
            recipe_of({"model_type": "xglm", "num_layers": 1}, loss=loss),
            "how xglm computes logits.*use loss: standard",
        ),
        "router": (recipe_of(BALANCED, loss=loss), "balances its experts.*use loss: standard"),
    }  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", refused("fused"))
def test_what_would_be_another_loss_is_refused(name: str, loss: Any):
    recipe, words = refused(loss)[name]
    with pytest.raises(InputError, match=words) as caught:
        assemble(recipe, torch.device("meta"))
    assert f"loss = '{loss}'" in str(caught.value)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_registry_knows_them_and_their_adapters(loss: Any):
    registry.check(tiny_recipe(loss=loss))
    for kind in ("prompt", "prefix", "p-tuning"):
        with pytest.raises(InputError, match="around the model's own forward"):
            registry.check(tiny_recipe(loss=loss, adapter=Adapter(kind=kind)))
