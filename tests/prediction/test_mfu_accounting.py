"""MFU, HFU and money: published runs, PaLM's appendix B, torch's own FLOP counter."""

import json
from pathlib import Path
from typing import Any

import pytest

import trainfit
from trainfit.catalog import load
from trainfit.flops import closed_form
from trainfit.flops.closed_form import product_step_flops, step_flops
from trainfit.flops.shape import shape_of
from trainfit.ledger.ledger import Ledger
from trainfit.prediction.predict import predict
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch
from virtual_runs import recipe_of, steady_sum, with_layers

LLAMA_405B = load.model_config("llama-3.1-405b")
N_405B = 405_853_388_800


def test_6n_times_tokens_of_a_published_run() -> None:
    """Llama 3.1 405B: 3.8e25 FLOPs for 15.6e12 tokens (https://arxiv.org/abs/2407.21783, section 1)."""
    flops = step_flops(LLAMA_405B, N_405B, batch=1, seq=8192, attention="none")
    assert flops.model_flops / 8192 * 15.6e12 == pytest.approx(3.8e25, rel=0.01)


def test_palm_appendix_b() -> None:
    """PaLM 540B: 118 layers, 48 heads of 256, 2048 tokens: 6N + 12 L H Q T.

    46.2 % MFU at 238.3K tokens/s on 6144 TPU v4.
    """
    palm = {
        "model_type": "llama", "hidden_size": 18432, "intermediate_size": 73728, "num_hidden_layers": 118,
        "num_attention_heads": 48, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 256_000,
        "tie_word_embeddings": True,
    }  # fmt: skip
    flops = step_flops(palm, 540_350_000_000, batch=2048, seq=2048, attention="full")
    tokens = 2048 * 2048
    assert flops.model_flops / tokens == 6 * 540_350_000_000 + 12 * 118 * 48 * 256 * 2048
    mfu = flops.model_flops / (tokens / 238_300) / (6144 * 275e12)
    assert 100 * mfu == pytest.approx(46.2, abs=0.1)


@pytest.mark.parametrize(
    ("name", "published", "tables_left_out"),
    [
        ("mixtral-8x7b", 12.9e9, 0),  # https://arxiv.org/abs/2401.04088
        ("mixtral-8x22b", 39e9, 0),  # https://mistral.ai/news/mixtral-8x22b
        ("qwen3-30b-a3b", 3.3e9, 0),  # https://huggingface.co/Qwen/Qwen3-30B-A3B
        ("qwen3-235b-a22b", 22e9, 0),  # https://huggingface.co/Qwen/Qwen3-235B-A22B
        ("deepseek-v3", 37e9, 0),  # https://arxiv.org/abs/2412.19437
        ("deepseek-v2-lite", 2.4e9, 1),  # https://arxiv.org/abs/2405.04434
        ("olmoe-1b-7b", 1.3e9, 0),  # https://arxiv.org/abs/2409.02060
    ],
)
def test_active_parameters_of_mixtures(name: str, published: float, tables_left_out: int) -> None:
    """Each to 3 %; one source leaves the input embedding out."""
    row = load.model(name)
    params = row.published_params or 0
    active = closed_form.active_params(row.config, params)
    shape = shape_of(row.config)
    assert active - tables_left_out * shape.vocab * shape.hidden == pytest.approx(published, rel=0.03)


def counted_flops(model_type: str, tie: bool) -> tuple[float, float]:
    """(torch's count of a forward and backward, the closed form) for a small model with eager attention."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "model_type": model_type, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000,
        "tie_word_embeddings": tie,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes), attn_implementation="eager")
    tokens_bs = torch.zeros(2, 256, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens_bs, use_cache=False).logits.sum().backward()
    params = sum(p.numel() for p in model.parameters())
    multiplied = params - (
        0 if tie else sizes["vocab_size"] * sizes["hidden_size"]
    )  # A table is only looked up.
    attention = closed_form.attention_flops_per_token(shape_of(sizes), 256, "full")
    return counter.get_total_flops(), (6 * multiplied + attention) * 512


@pytest.mark.parametrize(("model_type", "tie"), [("llama", False), ("llama", True), ("qwen3", True)])
def test_the_closed_form_is_what_torch_counts(model_type: str, tie: bool) -> None:
    counted, closed = counted_flops(model_type, tie)
    assert closed == pytest.approx(counted, rel=2e-3)  # Norms' weights are no products.


def test_causal_halves_and_adapters_keep_the_scores() -> None:
    shape = shape_of(LLAMA_405B)
    full, causal = (closed_form.attention_flops_per_token(shape, 4096, kind) for kind in ("full", "causal"))
    assert full == 12 * 126 * 128 * 128 * 4096
    assert causal == full / 2
    both = [
        step_flops(LLAMA_405B, N_405B, batch=1, seq=4096, trained=kind).model_flops
        for kind in ("all", "adapter")
    ]
    assert both[0] - both[1] == 2 * N_405B * 4096


def test_a_latent_attention_head_has_its_own_value_size() -> None:
    shape = shape_of(load.model_config("deepseek-v3"))
    assert (shape.head_dim, shape.value_dim, shape.dense_layers) == (192, 128, 3)


def test_an_unknown_model_type_is_refused_not_guessed() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 9}
    with pytest.raises(InputError, match=r"model_type.*no closed form"):
        shape_of({"model_type": "mamba", **sizes})


# -- the closed form of products and the count ---------------------------------------------------------------


PECULIAR = (
    "mistral-7b-v0.1", "gemma-2-2b", "phi-3-mini-4k", "opt-350m", "falcon-40b", "deepseek-v3",
    "deep-one-1.6b",
)  # fmt: skip
"""Windows of few tokens, and shapes of their own; other families are in test_model_families_by_version.py."""


def counted_and_config(name: str, **fields: Any) -> tuple[Ledger, dict[str, Any]]:
    """At real widths, few layers, and windows shorter than the 96 tokens."""
    config = with_layers(
        name, 6 if name.startswith("gemma-3") else 4 if name.startswith("deepseek-v3") else 2
    )
    if config.get("sliding_window"):
        config["sliding_window"] = 40
    implementation = "native" if config["model_type"] == "trainfit" else "hf"
    return trace(recipe_of(config, implementation, batch=Batch(micro=2, seq=96), **fields)), config


@pytest.mark.parametrize("name", PECULIAR)
def test_products_are_what_the_virtual_gpu_counts(name: str) -> None:
    ledger, config = counted_and_config(name)
    for attention, quantity in (("causal", "model_flops"), ("full", "model_flops_full")):
        found = product_step_flops(config, batch=2, seq=96, attention=attention)
        assert found.model_flops == steady_sum(ledger, quantity)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "phi-2"])
def test_products_beside_an_adapter(name: str) -> None:
    """To 0.1 %: of the first block's adapters some need no gradient of their input either."""
    ledger, config = counted_and_config(name, adapter=Adapter(kind="lora", rank=8))
    found = product_step_flops(
        config, batch=2, seq=96, trained="adapter", adapter_params=ledger.trainable_params
    )
    assert found.model_flops == pytest.approx(steady_sum(ledger, "model_flops"), rel=1e-3)


def test_adapters_of_fused_experts_cost_more_than_the_closed_form_and_it_says_so() -> None:
    """PEFT writes the adapter of each expert out, B @ A, whichever tokens come to it."""
    ledger, config = counted_and_config("olmoe-1b-7b", adapter=Adapter(kind="lora", rank=8))
    found = product_step_flops(
        config, batch=2, seq=96, trained="adapter", adapter_params=ledger.trainable_params
    )
    assert found.model_flops < steady_sum(ledger, "model_flops")
    assert "PEFT writes out each expert's adapter" in found.convention


def test_every_model_of_the_catalog_has_products() -> None:
    for name in load.model_names():
        row = load.model(name)
        shape = shape_of(row.config)
        tables = shape.learned_positions * shape.hidden + (0 if shape.tied else shape.vocab * shape.hidden)
        if row.published_params:  # Norms and biases are the rest.
            active = closed_form.active_params(row.config, row.published_params)
            assert closed_form.multiplied_params(row.config) + tables == pytest.approx(active, rel=0.02), name
        assert len(closed_form.layer_windows(row.config)) == shape.layers, name


@pytest.mark.parametrize(("name", "implementation"), [("gpt2", "hf"), ("deep-one-1.6b", "native")])
def test_mfu_counts_what_recomputation_executes(name: str, implementation: str, tmp_path: Path) -> None:
    """A block's last product is not run again, nor the head: less than the closed form's whole forward."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(with_layers(name, 2)))
    usage = trainfit.mfu(str(path), batch=3, seq=64, step_s=1.0, recompute="full")
    recipe = recipe_of(with_layers(name, 2), implementation, batch=Batch(micro=1, seq=64), recompute="full")
    predicted = predict(recipe)
    assert usage.hardware_flops == 3 * predicted.hardware_flops
    assert usage.model_flops == 3 * predicted.model_flops
    assert usage.closed_form is not None
    assert usage.model_flops < usage.hardware_flops < usage.closed_form["hardware_flops"]


def test_windows_and_chunks() -> None:
    for seq in (7, 8, 9, 20, 64):
        at = range(seq)
        for limit in (None, ("window", 8), ("chunk", 8)):
            kind, tokens = limit or ("window", seq)
            seen = sum(
                q - k < tokens if kind == "window" else q // tokens == k // tokens
                for q in at
                for k in range(q + 1)
            )
            assert closed_form.visible_pairs(seq, limit) == seen
    assert [limit is None for limit in closed_form.layer_windows(load.model_config("gemma-3-1b"))] == [
        (layer + 1) % 6 == 0 for layer in range(26)
    ]
    window = {"use_sliding_window": True, "max_window_layers": 20, "sliding_window": 9}
    qwen = load.model_config("qwen2.5-0.5b") | window
    assert closed_form.layer_windows(qwen) == [None] * 20 + [("window", 9)] * 4
    assert closed_form.layer_windows(load.model_config("mistral-7b-v0.3")) == [None] * 32
