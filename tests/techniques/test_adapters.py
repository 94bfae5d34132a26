"""Prompt, p- and prefix tuning: ours on native against PEFT on transformers, and what they exclude."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from native_and_hf import TINY
from tiny_recipe import tiny_recipe
from tiny_step import BASE, FAMILIES, learned
from tiny_training import Listener, options_for, stop_at, tiny
from trainfit.models.weights.layout import layout
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, ModelSpec, Optimizer, Recipe
from trainfit.step import Step, assemble
from trainfit.training.loop import train
from virtual_runs import recipe_of, sums, with_layers

CPU = torch.device("cpu")
KINDS = ("prompt", "p-tuning", "prefix")
LEARNED = {
    "model_type": "trainfit", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 24,
    "position_embedding": "learned",
}  # fmt: skip


def adapted(kind: Any, code: Any = "hf", **fields: Any) -> Recipe:
    """A tiny recipe with five virtual tokens that learns fast."""
    adapter = Adapter(kind=kind, tokens=5, **fields.pop("options_for", {}))
    return tiny_recipe(code, adapter=adapter, **{"optimizer": Optimizer(lr=3e-2), **fields})


def trained(step: Step) -> dict[str, nn.Parameter]:
    return {name: p for name, p in step.model.named_parameters() if p.requires_grad}


# -- native against PEFT


def prefix_of(peft_embedding: Tensor, layer: int, shape: torch.Size) -> Tensor:
    """Return a layer's keys and values out of PEFT's one table.

    The table is [tokens, layers x (key, value) x heads x head size].
    """
    _, tokens, heads, size = shape
    return peft_embedding.view(tokens, -1, 2, heads, size)[:, layer].transpose(0, 1)


def twins(kind: Any, config: dict[str, Any], attention: Any) -> tuple[Step, Step]:
    """The same base and the same virtual tokens, transformers' with PEFT's and ours."""
    made = [
        assemble(
            Recipe(
                model=ModelSpec(config=config, implementation=code),
                adapter=Adapter(kind=kind, tokens=5),
                batch=Batch(micro=2, seq=12),
                precision="fp32",
                attention=attention,
            ),
            CPU,
        )
        for code in ("hf", "native")
    ]
    theirs, ours = (step.model for step in made)
    base = getattr(ours, "base", ours)
    state: dict[str, Tensor] = theirs.base_model.state_dict()  # pyright: ignore
    encoder: dict[str, Tensor] = theirs.prompt_encoder["default"].state_dict()  # pyright: ignore
    with torch.no_grad():
        for entry in layout(base):  # pyright: ignore
            entry.of(base.get_parameter(entry.parameter)).copy_(state[entry.name])  # pyright: ignore
        if kind != "prefix":
            ours.prompt_encoder.load_state_dict(encoder)  # pyright: ignore
        else:
            for index, block in enumerate(base.layers):  # pyright: ignore
                own = block.attention.prefix  # pyright: ignore
                own.copy_(prefix_of(encoder["embedding.weight"], index, own.shape))
    return made[0], made[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("qwen3", "eager")])
def test_native_equals_peft(kind: Any, attention: Any, family: str):
    """Loss, logits and the virtual tokens' gradients are those of PEFT.

    The random weights are large enough that a wrong position shows.
    """
    theirs, ours = twins(kind, {"model_type": family, **TINY}, attention)
    batch = theirs.random_batches()[0]
    batch["labels"][0, :3] = -100
    outs = [step.model(**batch) for step in (theirs, ours)]
    torch.testing.assert_close(outs[1].loss, outs[0].loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(outs[1].logits, outs[0].logits, rtol=1e-4, atol=1e-4)
    for out in outs:
        out.loss.backward()
    gradients = [[p.grad for p in trained(step).values()] for step in (theirs, ours)]
    if kind == "prefix":
        (table,) = gradients[0]
        assert table is not None
        gradients[0] = [prefix_of(table, i, g.shape) for i, g in enumerate(gradients[1])]  # pyright: ignore
    for mine, other in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-6)


def test_a_prefix_of_learned_positions_moves_the_sequence():
    """Token i stands at position tokens + i, as transformers counts behind a cache."""
    recipe = Recipe(
        model=ModelSpec(config=LEARNED, implementation="native"), adapter=Adapter(kind="prefix", tokens=5),
        batch=Batch(micro=1, seq=19), precision="fp32",
    )  # fmt: skip
    step = assemble(recipe, CPU)
    model: Any = step.model
    with torch.no_grad():
        model.embed_positions.weight[:5] = float("nan")
    assert torch.isfinite(step.loss(step.random_batches()[0]))


# -- what they do


@pytest.mark.parametrize("code", ["hf", "native"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_virtual_tokens_train(code: Any, kind: Any):
    """Counts: t e; t e and three layers of e x e and e; 2 t numbers a key head's element and layer."""
    step, losses = learned(adapted(kind, code, precision="bf16"))
    assert losses[-1] < losses[0]
    expected = {"prompt": 5 * 32, "p-tuning": 5 * 32 + 3 * (32 * 32 + 32), "prefix": 2 * 2 * 5 * 16}[kind]
    assert sum(parameter.numel() for parameter in trained(step).values()) == expected
    dtypes = {("bf16", "fp32"): torch.float32, ("bf16", "base"): torch.bfloat16}
    dtypes |= {("amp-bf16", "fp32"): torch.float32, ("amp-bf16", "base"): torch.float32}
    for (precision, dtype), built in dtypes.items():
        step = assemble(adapted(kind, code, precision=precision, options_for={"dtype": dtype}), CPU)
        assert {parameter.dtype for parameter in trained(step).values()} == {built}


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("prompt", "hf"),
        ("p-tuning", "hf"),
        ("prompt", "native"),
        ("p-tuning", "native"),
        ("prefix", "native"),
    ],
)
def test_recomputation_changes_nothing(code: Any, kind: Any):
    plain = adapted(kind, code, quantize="nf4" if code == "native" else None)
    assert learned(plain.model_copy(update={"recompute": "full"}))[1] == learned(plain)[1]


OTHERS: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "phi": BASE | {"model_type": "phi", "intermediate_size": 64},
    "bloom": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
    "gemma3": BASE
    | {"model_type": "gemma3_text", "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8},
    "opt, narrow tokens": {
        "model_type": "opt", "hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 32,
        "dropout": 0.0,
    },
    "mistral": BASE
    | {"model_type": "mistral", "intermediate_size": 64, "num_key_value_heads": 2, "sliding_window": 6},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *(("prefix", family) for family in OTHERS),
        *(("prompt", family) for family in ("gpt2", "bloom", "gemma3", "mixtral", "opt, narrow tokens")),
        ("p-tuning", "opt, narrow tokens"),
    ],
)
def test_other_families_learn(family: str, kind: Any):
    """Whatever their heads, caches and windows are."""
    recipe = adapted(kind, batch=Batch(micro=2, seq=8))
    step, losses = learned(recipe.model_copy(update={"model": ModelSpec(config=OTHERS[family])}), 3)
    assert losses[2] < losses[1] < losses[0]
    assert all("prompt_encoder" in name for name in trained(step))


@pytest.mark.parametrize(
    "settings",
    [
        ("adapter={kind: lora, rank: 4, dropout: 0.1}", "quantize=nf4", "precision=bf16"),
        ("adapter={kind: prefix, tokens: 5}", "quantize=fp8", "model.implementation=native"),
        ("adapter={kind: p-tuning, tokens: 5}", "quantize=int8"),
    ],
    ids=lambda settings: settings[1],
)
def test_training_stops_and_goes_on_to_the_last_bit(tmp_path: Path, settings: tuple[str, ...]):
    """Codes are saved as they are; perplexity on held-out documents is that of the unbroken run."""
    recipe = tiny(*settings)
    straight = train(recipe, options_for(tmp_path / "straight", 4))
    first = train(recipe, options_for(tmp_path / "broken", 4), observers=[Listener(stop_at(2))])
    second = train(recipe, options_for(tmp_path / "broken", 4, resume=True))
    assert (first.steps, second.first_step) == (2, 2)
    assert first.losses + second.losses == straight.losses
    assert second.eval_perplexity == straight.eval_perplexity


# -- what they exclude

WINDOW = {**LEARNED, "position_embedding": "rope", "sliding_window": 4}


@pytest.mark.parametrize(
    ("kind", "config", "code", "text"),
    [
        ("prompt", FAMILIES["gpt2"], "hf", "batch.seq = 28: with 5 virtual tokens it is over the model's 32"),
        ("prefix", FAMILIES["gpt2"], "hf", "batch.seq = 28"),
        ("prefix", LEARNED, "native", "batch.seq = 28: the model has 24 learned positions"),
        ("prefix", WINDOW, "native", "adapter.kind = 'prefix': a prefix has no distance"),
        ("prefix", {**BASE, "model_type": "falcon"}, "hf",
         "adapter.kind = 'prefix': this model's layers do not take keys"),
        ("prefix", {**BASE, "model_type": "mamba", "state_size": 4}, "hf", "adapter.kind = 'prefix'"),
    ],
    ids=str,
)  # fmt: skip
def test_refused_by_the_model(kind: Any, config: dict[str, Any], code: Any, text: str):
    recipe = adapted(kind, batch=Batch(micro=1, seq=28))
    model = ModelSpec(config=config, implementation=code)
    with pytest.raises(InputError) as caught:
        assemble(recipe.model_copy(update={"model": model}), CPU)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


# -- predicted


@pytest.mark.parametrize(
    ("kind", "code"), [("prompt", "hf"), ("prompt", "native"), ("p-tuning", "native"), ("prefix", "native")]
)
def test_a_few_layers_stand_for_all(code: Any, kind: Any):
    recipe = tiny_recipe(code, 5, adapter=Adapter(kind=kind, tokens=16))
    short = trace(recipe)
    assert short.repeats
    found = sums(short)
    assert found == sums(trace(recipe, whole=True))
    assert found["ops_without_flops"] == ()
    expected = {"prompt": 16 * 32, "p-tuning": 16 * 32 + 3 * (32**2 + 32), "prefix": 5 * 2 * 16 * 16}
    assert found["params"][1] == expected[kind]


def predicted(code: Any, kind: Any, tokens: int, seq: int) -> dict[str, Any]:
    config, adapter = with_layers("llama-3.2-1b", 2), Adapter(kind=kind, tokens=tokens)
    return sums(trace(recipe_of(config, code, adapter=adapter, batch=Batch(seq=seq))))


def test_virtual_tokens_of_a_prompt_cost_what_real_ones_do():
    short, long = predicted("hf", "prompt", 16, 112), predicted("hf", "prompt", 64, 64)
    assert short["model_flops"] == long["model_flops"]
    assert short["peak_allocated_bytes"] == pytest.approx(long["peak_allocated_bytes"], rel=2e-3)


def test_virtual_tokens_of_a_prefix_take_no_products_but_attentions():
    none, prefix = predicted("native", "prefix", 1, 128), predicted("native", "prefix", 129, 128)
    # Forward and backward: two products of 2 x 128 x 128 x 2048 each way; no gradients of weights.
    extra = prefix["flops"] - none["flops"]
    assert extra == pytest.approx(2 * (4 + 10) * 128 * 128 * 2048, rel=0.01)
