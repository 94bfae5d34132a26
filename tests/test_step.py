"""The step: its loop, its phases, its batches, its checkpoint, and the same step on fake tensors."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tiny_recipe import tiny_recipe
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Optimizer
from trainfit.step import Step, assemble
from trainfit.virtual.trace.process_state import frozen_gc
from virtual_runs import recipe_of

CPU = torch.device("cpu")


def losses(step: Step, num_steps: int, first: int = 0) -> list[float]:
    return [step(step.random_batches(first + index)).item() for index in range(num_steps)]


def test_the_step_is_the_loop_that_torch_documents():
    recipe = tiny_recipe(optimizer=Optimizer(lr=1e-2))
    ours, model = assemble(recipe, CPU), assemble(recipe, CPU).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, fused=True)
    for index in range(3):
        batch = ours.random_batches(index)[0]
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert ours([batch]).item() == loss.item()
    for mine, plain in zip(ours.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, plain)


def test_phases_are_told_once_a_micro_batch():
    step = assemble(tiny_recipe(batch=Batch(micro=1, seq=8, accumulate=2)), CPU)
    phases: list[str] = []
    step(step.random_batches(), phases.append)
    assert phases == ["forward", "backward", "forward", "backward", "optimizer"]


def test_random_batches_depend_on_the_seed_only():
    recipe = tiny_recipe(batch=Batch(micro=2, seq=16, accumulate=3))
    one, two = assemble(recipe, CPU), assemble(recipe, CPU)
    batches = one.random_batches(7)
    assert len(batches) == 3
    for mine, other in zip(batches, two.random_batches(7), strict=True):
        assert mine["input_ids"].shape == (2, 16)
        assert mine["input_ids"].dtype == mine["labels"].dtype == torch.int64
        assert torch.equal(mine["input_ids"], other["input_ids"])
        assert torch.equal(mine["input_ids"], mine["labels"])
    assert not torch.equal(batches[0]["input_ids"], one.random_batches(8)[0]["input_ids"])


def test_the_seed_decides_the_weights():
    one, two, other = (assemble(tiny_recipe(seed=seed), CPU) for seed in (1, 1, 2))
    pairs = list(zip(one.model.parameters(), two.model.parameters(), other.model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


@pytest.mark.parametrize("in_backward", [False, True, "block"])
def test_a_step_that_is_dropped_frees_its_weights(in_backward: Any) -> None:
    step = assemble(tiny_recipe(optimizer=Optimizer(in_backward=in_backward)), CPU)
    step(step.random_batches())
    weights = [weakref.ref(parameter) for parameter in step.model.parameters()]
    del step
    gc.collect()
    assert not any(weight() is not None for weight in weights)


def test_the_output_is_dropped_before_backward():
    """As in the Hugging Face Trainer: only the loss lives on."""
    step = assemble(tiny_recipe(), CPU)
    seen: list[Any] = []
    step.model.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    alive: dict[str, bool] = {}

    def on_phase(phase: str) -> None:
        gc.collect()
        alive[phase] = any(reference() is not None for reference in seen)

    with frozen_gc():  # Or each collection visits all that was imported, for a second.
        step(step.random_batches(), on_phase)
    assert seen
    assert alive["backward"] is False


def test_gradients_are_none_after_a_step_and_there_before_the_update():
    step = assemble(tiny_recipe(), CPU)
    there: dict[str, int] = {}

    def on_phase(phase: str) -> None:
        there[phase] = sum(parameter.grad is not None for parameter in step.model.parameters())

    step(step.random_batches(), on_phase)
    num_parameters = len(list(step.model.parameters()))
    assert there == {"forward": 0, "backward": 0, "optimizer": num_parameters}
    assert all(parameter.grad is None for parameter in step.model.parameters())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"precision": "bf16"},
        {"precision": "amp-fp16"},
        {"optimizer": Optimizer(name="sgd", momentum=0.9, lr=0.1)},
        {"optimizer": Optimizer(name="adafactor", lr=1e-2), "precision": "bf16"},
        {"optimizer": Optimizer(name="adafactor", momentum=0.9, lr=1e-2), "precision": "bf16"},
        {"optimizer": Optimizer(in_backward=True)},
        {"adapter": Adapter(kind="lora", rank=4), "precision": "bf16"},
        {"recompute": "full", "batch": Batch(micro=1, seq=8, accumulate=2)},
    ],
    ids=str,
)
def test_a_resumed_step_continues_bit_for_bit(fields: dict[str, Any]):
    recipe = tiny_recipe(**fields)
    whole = assemble(recipe, CPU)
    losses(whole, 3)
    saved = copy.deepcopy(whole.state_dict())
    resumed = assemble(recipe.model_copy(update={"seed": 5}), CPU)
    resumed.load_state_dict(saved)
    assert losses(resumed, 3, first=3) == losses(whole, 3, first=3)
    for mine, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": Optimizer(implementation="fused")},
        {"optimizer": Optimizer(implementation="foreach")},
        {"optimizer": Optimizer(implementation="forloop")},
        {"optimizer": Optimizer(name="sgd", implementation="fused", momentum=0.9)},
        {"optimizer": Optimizer(name="sgd", implementation="foreach")},
        {"optimizer": Optimizer(name="sgd", implementation="forloop")},
        {"optimizer": Optimizer(in_backward=True)},
        {"recompute": "full"},
        {"recompute": "full", "attention": "math"},
        {"precision": "amp-bf16", "batch": Batch(micro=1, seq=8, accumulate=2)},
        {"precision": "amp-fp16"},
        {"precision": "bf16", "adapter": Adapter(kind="lora", rank=4)},
        {"precision": "bf16", "adapter": Adapter(kind="lora", rank=4, dtype="base"), "recompute": "full"},
    ],
    ids=str,
)
def test_the_same_step_runs_on_fake_tensors(fields: dict[str, Any]):
    """A first and a steady step have parameters, gradient dtypes and optimizer states of real tensors."""
    recipe = tiny_recipe(**fields)
    real = assemble(recipe, CPU)
    losses(real, 2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = assemble(recipe, CPU)
        for _ in range(2):
            loss = fake(fake.random_batches())
    assert isinstance(loss, FakeTensor)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert described(fake) == described(real)


def described(step: Step) -> list[Any]:
    """Shape and dtype of every parameter and of every tensor of its optimizer state."""
    rows: list[Any] = [
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in step.model.named_parameters()
    ]
    for optimizer in step.optimizers:
        for state in optimizer.state.values():
            rows += [(k, tuple(v.shape), v.dtype) for k, v in state.items() if isinstance(v, torch.Tensor)]
    return rows


def test_on_model_sees_the_bare_model_first():
    seen: list[torch.nn.Module] = []
    step = assemble(tiny_recipe(adapter=Adapter(kind="lora", rank=2)), CPU, on_model=seen.append)
    assert type(seen[0]).__name__ == "LlamaForCausalLM"
    assert step.model.training
    assert type(step.model).__name__.startswith("PeftModel")


@pytest.mark.parametrize("compiled", [False, "block", "model"])
@pytest.mark.parametrize(("name", "positions"), [("gpt2", 1024), ("opt-125m", 2048)])
def test_more_positions_than_the_model_has_are_refused(name: str, positions: int, compiled: Any):
    """OPT's table has two rows more than positions."""
    with torch.device("meta"), pytest.raises(InputError, match=f"{positions} learned positions"):
        assemble(
            recipe_of(name, batch=Batch(micro=1, seq=positions + 1), compile=compiled), torch.device("meta")
        )
