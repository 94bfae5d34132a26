"""Soft prompts and the layers that produce them: parameters while training and after, and their memory."""

from typing import Any

import pytest
import torch

from tiny_recipe import TINY_LLAMA
from trainfit.catalog.load import gpu
from trainfit.prediction.trace import trace
from trainfit.spec.recipe import Adapter, Recipe
from trainfit.step import assemble
from virtual_runs import recipe_of

TOKENS, HIDDEN = 6, 40
E = TINY_LLAMA["hidden_size"]
LAYERS = TINY_LLAMA["num_hidden_layers"]
HEADS, GROUPS = TINY_LLAMA["num_attention_heads"], TINY_LLAMA["num_key_value_heads"]
KEYS = E // HEADS * GROUPS  # Of a token in one layer


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def lstm(inputs: int, hidden: int, layers: int = 2) -> int:
    """Two directions; each has four gates with weights of input and state, and two biases."""
    sizes = [inputs] + [2 * hidden] * (layers - 1)
    return sum(2 * 4 * hidden * (size + hidden + 2) for size in sizes)


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "prompt": ({"kind": "prompt"}, TOKENS * E),
    "p-tuning, none": ({"kind": "p-tuning", "reparametrization": "none"}, TOKENS * E),
    "p-tuning, mlp": (
        {"kind": "p-tuning", "encoder_hidden_size": HIDDEN},
        TOKENS * E + linear(E, HIDDEN) + linear(HIDDEN, HIDDEN) + linear(HIDDEN, E),
    ),
    "p-tuning, lstm": (
        {"kind": "p-tuning", "reparametrization": "lstm", "encoder_hidden_size": HIDDEN},
        TOKENS * E + lstm(E, HIDDEN) + linear(2 * HIDDEN, 2 * HIDDEN) + linear(2 * HIDDEN, E),
    ),
    "prefix, none": ({"kind": "prefix"}, TOKENS * LAYERS * 2 * KEYS),
    "prefix, mlp": (
        {"kind": "prefix", "reparametrization": "mlp", "encoder_hidden_size": HIDDEN},
        TOKENS * KEYS + linear(KEYS, HIDDEN) + linear(HIDDEN, LAYERS * 2 * KEYS),
    ),
}


def of(name: str, implementation: str = "hf", **fields: Any) -> Recipe:
    adapter = Adapter(tokens=TOKENS, **CASES[name][0])
    return recipe_of(TINY_LLAMA, implementation, adapter=adapter, **fields)


@pytest.mark.parametrize("name", CASES)
def test_parameters_while_training_are_the_closed_form(name: str) -> None:
    implementations = ("hf",) if name == "prefix, mlp" else ("hf", "native")
    for implementation in implementations:
        assert trace(of(name, implementation), gpu("h200")).trainable_params == CASES[name][1]


@pytest.mark.parametrize("name", CASES)
def test_a_step_trains_every_parameter_of_the_layers(name: str) -> None:
    step = assemble(of(name, precision="fp32"), torch.device("cpu"))
    before = {key: p.detach().clone() for key, p in step.model.named_parameters() if p.requires_grad}
    step(step.random_batches())
    after = dict(step.model.named_parameters())
    still = [key for key, value in before.items() if torch.equal(after[key], value)]
    # The states of an LSTM begin at zero, so that biases train, and every weight once two steps are done.
    assert not still


def test_writing_the_kinds_own_layers_changes_no_recipe() -> None:
    assert Adapter(kind="p-tuning", reparametrization="mlp") == Adapter(kind="p-tuning")
    assert Adapter(kind="prefix", reparametrization="none") == Adapter(kind="prefix")
    assert of("p-tuning, none").id != of("prompt").id
