"""MFU, HFU and money: published runs, PaLM's appendix B, torch's own FLOP counter."""

from typing import Any

import pytest

from trainfit.catalog import load
from trainfit.ledger.ledger import Ledger
from trainfit.prediction import flops_accounting as fa
from trainfit.prediction.product_flops import (
    layer_windows,
    multiplied_params,
    product_step_flops,
    visible_pairs,
)
from trainfit.prediction.shape import shape_of
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch
from virtual_runs import recipe_of, steady_sum, with_layers

LLAMA_405B = load.model_config("llama-3.1-405b")
N_405B = 405_853_388_800


def mfu_405b(trained: fa.Trained, attention: fa.AttentionCount = "causal") -> float:
    flops = fa.step_flops(LLAMA_405B, N_405B, batch=16, seq=64, trained=trained, attention=attention)
    found = fa.utilization(
        flops.model_flops, flops.hardware_flops, step_s=30, num_gpus=8, peak_flops_per_s=1.3e15
    )
    return found.mfu


def test_405b_16x64_in_30_s_on_8_mi300x() -> None:
    assert round(100 * mfu_405b("all"), 2) == 0.80
    assert round(100 * mfu_405b("adapter"), 2) == 0.53
    assert (
        round(100 * mfu_405b("adapter", "full"), 2) == 0.53
    )  # 64 tokens: attention is nothing beside the weights.


def test_full_recomputation_reads_45_percent_mfu_as_60_percent_hfu() -> None:
    flops = fa.step_flops(LLAMA_405B, N_405B, batch=4, seq=4096, recomputed="full")
    step_s = fa.step_seconds(flops.model_flops, mfu=0.45, num_gpus=64, peak_flops_per_s=989.4e12)
    found = fa.utilization(
        flops.model_flops, flops.hardware_flops, step_s=step_s, num_gpus=64, peak_flops_per_s=989.4e12
    )
    assert (found.mfu, found.hfu) == (pytest.approx(0.45), pytest.approx(0.60))


def test_1_46_million_gpu_hours_at_2_dollars() -> None:
    """Llama 3.1 8B: 1.46M H100 hours (https://huggingface.co/meta-llama/Llama-3.1-8B, energy use)."""
    assert fa.dollars(1.46e6, 2.0) == pytest.approx(2.92e6)
    assert fa.gpu_hours(num_gpus=16_000, seconds=1.46e6 / 16_000 * 3600) == pytest.approx(1.46e6)


def test_6n_times_tokens_of_a_published_run() -> None:
    """Llama 3.1 405B: 3.8e25 FLOPs for 15.6e12 tokens (https://arxiv.org/abs/2407.21783, section 1)."""
    flops = fa.step_flops(LLAMA_405B, N_405B, batch=1, seq=8192, attention="none")
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
    flops = fa.step_flops(palm, 540_350_000_000, batch=2048, seq=2048, attention="full")
    tokens = 2048 * 2048
    assert flops.model_flops / tokens == 6 * 540_350_000_000 + 12 * 118 * 48 * 256 * 2048
    step_s = tokens / 238_300
    found = fa.utilization(
        flops.model_flops, flops.hardware_flops, step_s=step_s, num_gpus=6144, peak_flops_per_s=275e12
    )
    assert 100 * found.mfu == pytest.approx(46.2, abs=0.1)


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
    active = fa.active_params(row.config, params)
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
    attention = fa.attention_flops_per_token(shape_of(sizes), 256, "full")
    return counter.get_total_flops(), (6 * multiplied + attention) * 512


@pytest.mark.parametrize(("model_type", "tie"), [("llama", False), ("llama", True), ("qwen3", True)])
def test_the_closed_form_is_what_torch_counts(model_type: str, tie: bool) -> None:
    counted, closed = counted_flops(model_type, tie)
    assert closed == pytest.approx(counted, rel=2e-3)  # Norms' weights are no products.


def test_causal_halves_and_adapters_keep_the_scores() -> None:
    shape = shape_of(LLAMA_405B)
    full, causal = (fa.attention_flops_per_token(shape, 4096, kind) for kind in ("full", "causal"))
    assert full == 12 * 126 * 128 * 128 * 4096
    assert causal == full / 2
    both = [
        fa.step_flops(LLAMA_405B, N_405B, batch=1, seq=4096, trained=kind).model_flops
        for kind in ("all", "adapter")
    ]
    assert both[0] - both[1] == 2 * N_405B * 4096


def test_a_latent_attention_head_has_its_own_value_size() -> None:
    shape = shape_of(load.model_config("deepseek-v3"))
    assert (shape.head_dim, shape.value_dim, shape.dense_layers) == (192, 128, 3)


@pytest.mark.parametrize("name", load.model_names())
def test_every_model_of_the_catalog_has_a_shape(name: str) -> None:
    assert shape_of(load.model_config(name)).layers > 0


def test_an_unknown_model_type_is_refused_not_guessed() -> None:
    config = {
        "model_type": "mamba",
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 9,
    }
    with pytest.raises(InputError, match=r"model_type.*no closed form"):
        shape_of(config)


@pytest.mark.parametrize("wrong", [{"step_s": 0}, {"num_gpus": 0}, {"peak_flops_per_s": -1}])
def test_a_time_count_or_peak_that_is_not_positive_is_refused(wrong: dict) -> None:
    given = {"step_s": 1.0, "num_gpus": 1, "peak_flops_per_s": 1e12} | wrong
    with pytest.raises(ValueError, match="not positive"):
        fa.utilization(1e12, 1e12, **given)


# -- the closed form of products and the count
# --------------------------------------------------------------------


def families() -> list[str]:
    """The smallest model of each type in the catalog, and those whose shape is peculiar."""
    smallest: dict[str, tuple[int, str]] = {}
    for name in load.model_names():
        row = load.model(name)
        size = row.published_params or 10**15, name
        model_type = row.config["model_type"]
        smallest[model_type] = min(smallest.get(model_type, size), size)
    return sorted({name for _, name in smallest.values()} | {"opt-350m", "falcon-40b", "deep-one-1.6b"})


def counted_and_config(name: str, **fields: Any) -> tuple[Ledger, dict[str, Any]]:
    """At real widths, few layers, and windows shorter than the 96 tokens."""
    config = with_layers(
        name, 6 if name.startswith("gemma-3") else 4 if name.startswith("deepseek-v3") else 2
    )
    if config.get("sliding_window"):
        config["sliding_window"] = 40
    implementation = "native" if config["model_type"] == "trainfit" else "hf"
    return trace(recipe_of(config, implementation, batch=Batch(micro=2, seq=96), **fields)), config


@pytest.mark.parametrize("name", families())
def test_products_are_what_the_virtual_gpu_counts(name: str) -> None:
    ledger, config = counted_and_config(name)
    for attention, quantity in (("causal", "model_flops"), ("full", "model_flops_full")):
        found = product_step_flops(config, batch=2, seq=96, attention=attention)
        assert found.model_flops == steady_sum(ledger, quantity)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "gemma-3-1b", "phi-2"])
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


@pytest.mark.parametrize("name", load.model_names())
def test_every_model_of_the_catalog_has_products(name: str) -> None:
    row = load.model(name)
    shape = shape_of(row.config)
    tables = shape.learned_positions * shape.hidden + (0 if shape.tied else shape.vocab * shape.hidden)
    if row.published_params:  # Norms and biases are the rest.
        active = fa.active_params(row.config, row.published_params)
        assert multiplied_params(row.config) + tables == pytest.approx(active, rel=0.02)
    assert len(layer_windows(row.config)) == shape.layers


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
            assert visible_pairs(seq, limit) == seen
    assert [limit is None for limit in layer_windows(load.model_config("gemma-3-1b"))] == [
        (layer + 1) % 6 == 0 for layer in range(26)
    ]
    qwen = {
        **load.model_config("qwen2.5-0.5b"),
        "use_sliding_window": True,
        "max_window_layers": 20,
        "sliding_window": 9,
    }
    assert layer_windows(qwen) == [None] * 20 + [("window", 9)] * 4
    assert layer_windows(load.model_config("mistral-7b-v0.3")) == [None] * 32
