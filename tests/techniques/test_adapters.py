"""Prompt, p- and prefix tuning: ours on native against PEFT on transformers, and what they exclude."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from native_and_hf import TINY
from tiny_recipe import tiny_recipe
from tiny_step import BASE, FAMILIES, aot_eager, learned, trajectory
from tiny_training import Listener, asked, stop_at, tiny
from trainfit.models.native.layout import mapped_tensors, tensor_of
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, ModelSpec, Optimizer, Recipe
from trainfit.step import Step, assemble
from trainfit.techniques import registry
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
    adapter = Adapter(kind=kind, tokens=5, **fields.pop("asked", {}))
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
        for entry in mapped_tensors(base.config):  # pyright: ignore
            tensor_of(base, entry).copy_(state[entry.name])  # pyright: ignore
        if kind != "prefix":
            ours.prompt_encoder.load_state_dict(encoder)  # pyright: ignore
        else:
            for index, block in enumerate(base.layers):  # pyright: ignore
                own = block.attention.prefix  # pyright: ignore
                own.copy_(prefix_of(encoder["embedding.weight"], index, own.shape))
    return made[0], made[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
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


def test_the_last_virtual_token_predicts_the_first_real_one():
    """Written out: embeddings joined, the virtual tokens' own labels ignored."""
    step = assemble(adapted("prompt", "native"), CPU)
    batch = step.random_batches()[0]
    model: Any = step.model
    joined = torch.cat(
        (model.prompt_encoder.embedding.weight.expand(2, -1, -1), model.base.embed(batch["input_ids"])), 1
    )
    logits = model.base.lm_head(model.base.hidden(inputs_embeds=joined))
    expected = nn.functional.cross_entropy(logits[:, 4:-1].flatten(0, 1), batch["labels"].flatten())
    torch.testing.assert_close(step.loss(batch), expected)


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
@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-bf16"])
def test_only_virtual_tokens_train(code: Any, kind: Any, precision: Any):
    """Counts: t e; t e and three layers of e x e and e; 2 t numbers a key head's element and layer."""
    step, losses = learned(adapted(kind, code, precision=precision))
    assert losses[-1] < losses[0]
    expected = {"prompt": 5 * 32, "p-tuning": 5 * 32 + 3 * (32 * 32 + 32), "prefix": 2 * 2 * 5 * 16}[kind]
    assert sum(parameter.numel() for parameter in trained(step).values()) == expected
    assert {parameter.dtype for parameter in trained(step).values()} == {torch.float32}
    step = assemble(adapted(kind, code, precision=precision, asked={"dtype": "base"}), CPU)
    base = torch.bfloat16 if precision == "bf16" else torch.float32
    assert {parameter.dtype for parameter in trained(step).values()} == {base}


@pytest.mark.parametrize("code", ["hf", "native"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_recomputation_changes_nothing(code: Any, kind: Any, quantize: Any):
    plain = adapted(kind, code, quantize=quantize)
    if code == "hf" and kind == "prefix":
        with pytest.raises(InputError, match=r"recompute = 'full'.*model.implementation: native"):
            registry.check(plain.model_copy(update={"recompute": "full"}))
        return
    expected = learned(plain)[1]
    assert learned(plain.model_copy(update={"recompute": "full"}))[1] == expected


@pytest.mark.parametrize(
    ("kind", "code", "compiled"),
    [
        ("prompt", "hf", "block"),
        ("p-tuning", "native", "model"),
        ("prefix", "hf", "model"),
        ("prefix", "native", "block"),
    ],
)
def test_compiled_equals_eager_in_one_graph(fresh_compiler: None, kind: Any, code: Any, compiled: Any):
    """Compiled training equals eager, in one graph but for prefixes of native blocks.

    The first native block's input needs no gradient, so it has a graph of its own.
    """
    recipe = adapted(kind, code, layers=10 if compiled == "block" else 2)
    expected = trajectory(recipe, 2)[1]
    found = trajectory(recipe.model_copy(update={"compile": compiled}), 2, compiler=aot_eager)[1]
    assert found == pytest.approx(expected, rel=1e-5)
    assert counters["stats"]["unique_graphs"] == (2 if (kind, code) == ("prefix", "native") else 1)
    assert not counters["graph_break"]


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


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("kind", KINDS)
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
    straight = train(recipe, asked(tmp_path / "straight", 4))
    first = train(recipe, asked(tmp_path / "broken", 4), observers=[Listener(stop_at(2))])
    second = train(recipe, asked(tmp_path / "broken", 4, resume=True))
    assert (first.steps, second.first_step) == (2, 2)
    assert first.losses + second.losses == straight.losses
    assert second.eval_perplexity == straight.eval_perplexity


# -- what they exclude

WINDOW = {**LEARNED, "position_embedding": "rope", "sliding_window": 4}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kind": "prompt", "asked": {"rank": 8}}, "adapter.rank = 8: prompt has virtual tokens and no rank"),
        ({"kind": "p-tuning", "asked": {"dropout": 0.1}}, "adapter.dropout = 0.1: p-tuning"),
        ({"kind": "prefix", "asked": {"alpha": 4}}, "adapter.alpha = 4: prefix"),
        ({"kind": "prefix", "asked": {"targets": ("q_proj",)}}, "adapter.targets"),
        ({"kind": "prefix", "attention": "flash", "precision": "bf16"},
         "attention = 'flash': a prefix needs a mask"),
        ({"kind": "prefix", "compile": "block"}, "compile = 'block'"),
    ],
    ids=str,
)  # fmt: skip
def test_refused_before_a_model_is_built(fields: dict[str, Any], text: str):
    with pytest.raises(InputError) as caught:
        registry.check(adapted(**fields))
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "config", "code", "text"),
    [
        ("prompt", FAMILIES["gpt2"], "hf", "batch.seq = 28: with 5 virtual tokens it is over the model's 32"),
        ("prefix", FAMILIES["gpt2"], "hf", "batch.seq = 28"),
        ("prefix", LEARNED, "native", "batch.seq = 28: the model has 24 learned positions"),
        ("prefix", WINDOW, "native", "adapter.kind = 'prefix': a prefix has no distance"),
        ("prefix", {**BASE, "model_type": "falcon"}, "hf",
         "adapter.kind = 'prefix': this model's layers keep no keys"),
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


@pytest.mark.parametrize("code", ["hf", "native"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_few_layers_tell_the_whole_model(code: Any, kind: Any):
    config = with_layers("llama-3.2-1b", 5)
    recipe = recipe_of(config, code, adapter=Adapter(kind=kind, tokens=16), batch=Batch(micro=2, seq=112))
    told = sums(trace(recipe))
    assert told == sums(trace(recipe, whole=True))
    assert told["ops_without_flops"] == ()
    expected = {"prompt": 16 * 2048, "p-tuning": 16 * 2048 + 3 * (2048**2 + 2048), "prefix": 5 * 2 * 16 * 512}
    assert told["params"][1] == expected[kind]


@pytest.mark.parametrize("code", ["hf", "native"])
def test_virtual_tokens_cost_what_real_ones_do(code: Any):
    """Virtual tokens of a prompt cost what as many real ones do, in memory and in FLOPs.

    Those of a prefix take no products but attention's.
    """
    config = with_layers("llama-3.2-1b", 2)

    def predicted(kind: Any, tokens: int, seq: int) -> dict[str, Any]:
        return sums(
            trace(recipe_of(config, code, adapter=Adapter(kind=kind, tokens=tokens), batch=Batch(seq=seq)))
        )

    short, long = predicted("prompt", 16, 112), predicted("prompt", 64, 64)
    assert short["model_flops"] == long["model_flops"]
    assert short["peak_allocated_bytes"] == pytest.approx(long["peak_allocated_bytes"], rel=2e-3)
    none, prefix = predicted("prefix", 1, 128), predicted("prefix", 129, 128)
    # Forward and backward: two products of 2 x 128 x 128 x 2048 each way; no gradients of weights.
    extra = prefix["flops"] - none["flops"]
    assert extra == pytest.approx(2 * (4 + 10) * 128 * 128 * 2048, rel=0.01)
