"""Plans by block: the same gradients, and the predicted bytes."""

from typing import Any

import peft  # noqa: F401
import pytest
import torch
import transformers.optimization  # noqa: F401 - a few tensors are made while these two are imported, the first time
from torch import Tensor, nn

from planned_recipe import layers
from tiny_step import gradients, same_bits
from trainfit.checkpointing.rematerialize import SavedTensorMode
from trainfit.measurement.run import measure
from trainfit.prediction.predict import predict
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Batch, Hardware, Optimizer, Recipe
from trainfit.step import assemble
from trainfit.techniques.registry import describe
from trial_start import forked
from virtual_runs import recipe_of, sums, with_layers

SMALL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = with_layers("gpt2", 3) | {
    "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
CASES = {"llama": (SMALL, "hf"), "gpt2, which drops out": (GPT2, "hf"), "native": (SMALL, "native")}


PLANS = [
    layers(("elementwise", 0.7, 3)),
    layers(("none", 0.5, 3)),
    layers(("full", 1.0, 3)),
    layers(("full", 0.0, 1), ("elementwise", 1.0, 1), ("none", 0.0, 1)),
]
MIXED = layers(("full", 0.0, 1), ("elementwise", 0.0, 1), ("none", 0.0, 1))


def on_cpu(case: str, **fields: Any) -> Recipe:
    config, implementation = CASES[case]
    settings = {"batch": Batch(micro=2, seq=32), "precision": "fp32", "hardware": Hardware(gpu="cpu")}
    return recipe_of(config, implementation, **{**settings, **fields})


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_equal_to_the_bit(case: str) -> None:
    _, expected = gradients(on_cpu(case))
    for planned in PLANS:
        assert same_bits(gradients(on_cpu(case, recompute=planned))[1], expected), planned


@pytest.mark.parametrize("case", ["llama", "native"])
def test_a_real_cpu_holds_the_predicted_bytes(case: str) -> None:
    # Nothing is offloaded: on a CPU that is device memory too.
    recipe = on_cpu(case, recompute=MIXED)
    predicted, measured = predict(recipe), measure(recipe, steps=0, device="cpu", start=forked)
    assert measured.status == "done", measured.message
    assert predicted.phases == measured.phases


def test_a_few_blocks_stand_for_all() -> None:
    planned = layers(("full", 0.0, 4), ("elementwise", 0.0, 3), ("none", 0.0, 1))
    recipe = recipe_of(SMALL | {"num_hidden_layers": 8}, precision="bf16", recompute=planned)
    short = trace(recipe)
    assert short.repeats
    assert sums(short) == sums(trace(recipe, whole=True))


def test_each_run_that_offloads_is_marked() -> None:
    recipe = on_cpu("llama", recompute=layers(("none", 0.5, 4), ("none", 0.0, 24)))
    assert describe(recipe) == "fp32, recompute 4 none (partly offloaded) + 24 none"


def test_blocks_of_two_kinds_are_still_the_models_blocks() -> None:
    """A plan changes the class of some blocks only; the decoder's blocks must all be found."""
    planned = layers(("full", 0.0, 1), ("none", 0.0, 2))
    by_block = Optimizer(in_backward="block")
    step = assemble(on_cpu("llama", recompute=planned, optimizer=by_block), torch.device("cpu"))
    plain = assemble(on_cpu("llama", optimizer=by_block), torch.device("cpu"))
    assert len(step.optimizers) == len(plain.optimizers)
    assemble(
        on_cpu("llama", recompute=planned, optimizer=Optimizer(name="muon", momentum=0.95)),
        torch.device("cpu"),
    )
    given: list[nn.Module] = []
    assemble(on_cpu("llama", recompute=planned, compile="block"), torch.device("cpu"), compiler=given.append)
    assert len(given) == 3


@pytest.mark.parametrize("by_keyword", [False, True])
def test_what_is_held_may_not_be_written_into(by_keyword: bool) -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(32, 64)
    with SavedTensorMode(x, [weight]):
        y = x @ weight
        kept_for = (y * y).sum()
        extra = {"out": y.detach()} if by_keyword else {}
        write = torch.mul if by_keyword else Tensor.mul_
        with pytest.raises(InputError, match=r"recompute\.layers = 'elementwise'"):
            write(y.detach(), 0.0, **extra)
    assert kept_for.requires_grad
