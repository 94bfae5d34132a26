"""Packed documents and weight decay groups, in the real step and in the predicted one."""

import json
from typing import Any

import pytest
import torch

from tiny_training import GPT2, LLAMA, tiny
from trainfit.prediction.predict import predict
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.step import Step, assemble
from trainfit.techniques.optimizer.decay_groups import kinds_of
from trainfit.training.saved_state import OptimizerPlain
from trainfit.training.state import check_optimizer, optimizer_state

CPU = torch.device("cpu")
NO_DROPOUT = {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
IDS = torch.randint(384, (2, 32), generator=torch.Generator().manual_seed(0))
FIRST = 12
"""Tokens of the first of two documents."""


def packed() -> dict[str, torch.Tensor]:
    labels = IDS.clone()
    labels[:, [0, FIRST]] = -100
    positions = torch.cat((torch.arange(FIRST), torch.arange(32 - FIRST))).repeat(2, 1)
    return {"input_ids": IDS, "labels": labels, "position_ids": positions}


def alone(step: Step, ids: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(ids.shape[1]).repeat(len(ids), 1)
    return step.loss({"input_ids": ids, "labels": ids, "position_ids": positions})


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (LLAMA, ("attention=sdpa",)),
        (LLAMA, ("attention=eager",)),
        (LLAMA, ("loss_terms.z_loss=1e-4",)),
        (LLAMA, ("model.implementation=native",)),
        (LLAMA, ("model.implementation=native", "attention=eager")),
        ({**LLAMA, "model_type": "mistral", "sliding_window": 6}, ("model.implementation=native",)),
        ({**LLAMA, "model_type": "mistral", "sliding_window": 6}, ()),
        (NO_DROPOUT, ()),
    ],
)
def test_a_packed_document_has_the_loss_that_it_has_alone(config: dict[str, Any], settings: tuple[str, ...]):
    step = assemble(tiny("data.pack=documents", *settings, config=config), CPU)
    with torch.no_grad():
        apart = [alone(step, IDS[:, :FIRST]) * (FIRST - 1), alone(step, IDS[:, FIRST:]) * (31 - FIRST)]
        assert step.loss(packed()).item() == pytest.approx((sum(apart) / 30).item(), rel=1e-5)
    crossing = assemble(tiny(*settings, config=config), CPU)
    with torch.no_grad():
        assert crossing.loss(packed() | {"position_ids": torch.arange(32)[None]}).item() != pytest.approx(
            (sum(apart) / 30).item(), rel=1e-5
        )


@pytest.mark.parametrize("settings", [(), ("model.implementation=native",)])
def test_the_mask_is_in_the_predicted_step(settings: tuple[str, ...]):
    def peak(*more: str) -> int:
        recipe = tiny("batch.seq=64", "hardware.gpu=h100-sxm", "precision=bf16", *settings, *more)
        return predict(recipe).peak_allocated_bytes

    assert peak("data.pack=false") == peak()
    assert peak("data.pack=documents") != peak()


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("attention=triton", "documents are separated by a mask"),
        ("attention=flash", "documents are separated by a mask"),
        ("compile=model", "compiled whole"),
        ("adapter={kind: prompt}", "before the first document"),
    ],
)
def test_what_takes_no_mask_is_refused(setting: str, says: str):
    with pytest.raises(InputError, match=says):
        assemble(tiny("data.pack=documents", "precision=bf16", setting), CPU)


def test_a_model_that_carries_a_state_is_refused():
    config = {
        "model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 384, "state_size": 4,
    }  # fmt: skip
    with pytest.raises(InputError, match=r"data\.pack = 'documents'"):
        assemble(tiny("data.pack=documents", config=config), CPU)


def test_micro_batches_weigh_by_their_labels():
    """The gradient is that of the mean over all labels, as of one batch."""

    def gradients(accumulate: int) -> list[torch.Tensor]:
        recipe = tiny(
            f"batch.micro={2 // accumulate}", f"batch.accumulate={accumulate}", "optimizer.name=sgd"
        )
        step = assemble(recipe, CPU)
        before = [parameter.detach().clone() for parameter in step.model.parameters()]
        batches = [{"input_ids": IDS, "labels": labels}]
        if accumulate == 2:
            weights = [torch.tensor(3 / 17, dtype=torch.float64), torch.tensor(31 / 17, dtype=torch.float64)]
            batches = [
                {"input_ids": IDS[i : i + 1], "labels": labels[i : i + 1], "weight": weights[i]}
                for i in (0, 1)
            ]
        losses.append(step(batches).item())
        return [one - after for one, after in zip(before, step.model.parameters(), strict=True)]

    losses: list[float] = []
    labels = IDS.clone()
    labels[0, :29] = -100
    for one, two in zip(gradients(1), gradients(2), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-7)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def decayed(recipe: Recipe) -> set[str]:
    step = assemble(recipe, CPU)
    names = {parameter: name for name, parameter in step.model.named_parameters()}
    groups = [group for optimizer in step.optimizers for group in optimizer.param_groups]
    assert sum(len(group["params"]) for group in groups) == len(names)
    return {names[one] for group in groups if group["weight_decay"] for one in group["params"]}


@pytest.mark.parametrize("config", [LLAMA, GPT2])
def test_no_decay_is_the_trainers_rule(config: dict[str, Any]):
    from transformers import Trainer

    model = assemble(tiny(config=config), CPU).model
    expected = set(Trainer.get_decay_parameter_names(None, model))  # pyright: ignore[reportArgumentType]
    given = tiny("optimizer.no_decay=[norms,biases]", config=config)
    assert decayed(given) == expected & {name for name, _ in model.named_parameters()}
    embeddings = {name for name in expected if kinds_of(model)[model.get_parameter(name)] == "embeddings"}
    assert embeddings
    assert decayed(tiny("optimizer.no_decay=[norms,biases,embeddings]", config=config)) == (
        expected & {name for name, _ in model.named_parameters()} - embeddings
    )


@pytest.mark.parametrize(
    "settings", [("optimizer.name=muon",), ("optimizer.name=sgd",), ("optimizer.in_backward=block",)]
)
def test_decay_groups_with_every_kind_of_optimizer(settings: tuple[str, ...]):
    recipe = tiny("optimizer.no_decay=norms", *settings)
    assert not any("norm" in name for name in decayed(recipe))
    step = assemble(recipe, CPU)
    step(step.random_batches())
    tensors, plain = optimizer_state(step)
    saved = OptimizerPlain(**json.loads(json.dumps(plain)))
    check_optimizer(step, tensors, saved)
    with pytest.raises(InputError, match="other groups"):
        check_optimizer(assemble(tiny(*settings), CPU), tensors, saved)
