"""Recomputation: bitwise equal gradients, the predicted bytes, and no unnecessary work."""

from typing import Any

import peft  # noqa: F401
import pytest
import torch
import transformers.optimization  # noqa: F401 - a few tensors are made while these two are imported, the first time
from torch._functorch import config as functorch_config
from torch.utils import flop_counter

from compiled_blocks import CUBLAS_WORKSPACE, TOKENS, E, SwiGlu, kept, kept_by_torch, step_of
from tiny_step import aot_eager, gradients, same_bits
from trainfit.ledger.ledger import ALLOCATE, Ledger
from trainfit.measurement.run import measure
from trainfit.prediction.predict import predict
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Hardware, ModelSpec, Recipe
from trainfit.spec.recompute import Budget, Every, SavedOps, Selective  # fmt: skip
from trainfit.step import assemble
from trainfit.techniques.recompute.budget import grouped_heads_counted
from trainfit.virtual.cuda.scratch import gpu_traits
from trial_start import forked
from virtual_runs import PLAIN, recipe_of, steady_sum, sums, with_layers

# As wide as products that are worth keeping.
LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 640, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
DEEP_LLAMA = LLAMA | {"num_hidden_layers": 9}
GPT2 = with_layers("gpt2", 2) | {
    "n_embd": 512, "n_head": 8, "vocab_size": 128, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LORA = Adapter(kind="lora", rank=4)


def keeping(*save: str) -> Selective:
    return Selective(selective=SavedOps(save=save))


SECOND = Selective(selective=SavedOps(save=("attention", "mm"), every=2))


def on_cpu(config: Any, implementation: Any = "hf", **fields: Any) -> Recipe:
    return recipe_of(
        config, implementation, **{"batch": Batch(micro=2, seq=32), "precision": "fp32", **fields}
    )


@pytest.mark.parametrize("implementation", ["hf", "native"])
def test_gradients_are_equal_to_the_bit(implementation: str) -> None:
    loss, wanted = gradients(on_cpu(LLAMA, implementation))
    assert len(wanted) > 20
    for recompute in ("selective", keeping("attention", "silu"), SECOND, Every(every=2), "full"):
        again, found = gradients(on_cpu(LLAMA, implementation, recompute=recompute))
        assert loss == again
        assert same_bits(found, wanted), recompute


def test_dropout_repeats_itself_where_some_of_it_is_kept() -> None:
    """A kept result of a random operation is not drawn again, and what is drawn after it must not notice."""
    _, wanted = gradients(on_cpu(GPT2))
    for recompute in ("selective", keeping("native_dropout"), keeping("mm", "bernoulli"), Every(every=2)):
        assert same_bits(gradients(on_cpu(GPT2, recompute=recompute))[1], wanted), recompute


def test_an_adapter_inside_peft_learns_the_same() -> None:
    _, wanted = gradients(on_cpu(LLAMA, adapter=LORA))
    assert len(wanted) == 2 * 7 * LLAMA["num_hidden_layers"]
    for recompute in ("selective", Every(every=2)):
        assert same_bits(gradients(on_cpu(LLAMA, adapter=LORA, recompute=recompute))[1], wanted), recompute


def test_compiled_gradients_are_the_eager_ones(fresh_compiler: None) -> None:
    """The partitioner's graphs, run operation by operation."""
    config = LLAMA | {"num_hidden_layers": 2}
    _, wanted = gradients(on_cpu(config, "native"))
    cases: dict[Any, Any] = {
        "selective": "block",
        SECOND: "block",
        Every(every=2): "model",
        Budget(budget=0.5): "model",
    }
    for recompute, mode in cases.items():
        recipe = on_cpu(config, "native", recompute=recompute, compile=mode)
        assert same_bits(gradients(recipe, compiler=aot_eager)[1], wanted), recompute
        torch._dynamo.reset()


OWN_FUNCTIONS: dict[str, dict[str, Any]] = {
    "fused sums": {"precision": "bf16", "accumulation": "fused"},
    "kernels": {"precision": "bf16", "block_kernels": "swiglu-rope"},
    "fp8": {"precision": "fp8", "block_kernels": "fp8"},
}


@pytest.mark.parametrize("torch_version", [None, (2, 11)], ids=str)
@pytest.mark.parametrize("name", OWN_FUNCTIONS)
def test_a_compiled_block_with_functions_of_its_own_keeps_its_input_alone(
    name: str, torch_version: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the compiler recomputes what they save, or, as with torch 2.11, the whole block runs again."""
    if torch_version:
        monkeypatch.setattr(gpu_traits, "installed_torch", lambda: torch_version)
    config = LLAMA | {"hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 12}
    seq = 320 if torch_version else 256  # Not the same recipe twice: traces are kept.
    fields = {
        "compile": "block", "batch": Batch(micro=8, seq=seq, accumulate=2), **OWN_FUNCTIONS[name],
        "hardware": Hardware(gpu="h100-sxm"),
    }  # fmt: skip
    none, again = (predict(recipe_of(config, "native", **fields, recompute=one)) for one in ("none", "full"))
    assert again.breakdown.activations < 0.12 * none.breakdown.activations
    whole = again.hardware_flops / none.hardware_flops
    assert 1.2 < whole <= 4 / 3 + 0.01
    if torch_version:
        assert whole > 1.32  # The last product runs again too.


CASES: dict[str, Recipe] = {
    "selective": on_cpu(LLAMA | {"num_hidden_layers": 5}, precision="bf16", recompute="selective"),
    "second": on_cpu(LLAMA | {"num_hidden_layers": 5}, precision="bf16", recompute=SECOND),
    "dropout": on_cpu(GPT2, recompute=keeping("mm", "native_dropout")),
    "every": on_cpu(DEEP_LLAMA, "native", recompute=Every(every=2), precision="amp-bf16"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_real_cpu_holds_the_predicted_bytes(case: str) -> None:
    recipe = CASES[case].model_copy(update={"hardware": Hardware(gpu="cpu")})
    predicted, measured = predict(recipe), measure(recipe, steps=0, device="cpu", start=forked)
    assert measured.status == "done", measured.message
    assert predicted.phases == measured.phases


@pytest.mark.parametrize("case", ["selective", "second", "every"])
def test_a_few_blocks_stand_for_all(case: str) -> None:
    short = trace(CASES[case])
    assert short.repeats
    assert sums(short) == sums(trace(CASES[case], whole=True))


def test_products_and_attention_are_not_computed_twice() -> None:
    """Selective: no FLOP more than without; every other block: five of nine of what full computes again."""
    flops = {}
    for recompute in ("none", "selective", Every(every=2), "full"):
        ledger = trace(on_cpu(DEEP_LLAMA, "native", precision="bf16", recompute=recompute))
        flops[str(recompute)] = steady_sum(ledger, "flops")
    assert flops["selective"] == flops["none"]
    assert 9 * (flops["every=2"] - flops["none"]) == 5 * (flops["full"] - flops["none"]) > 0


def test_every_second_product_is_kept() -> None:
    """Of q, k, v, attention's output, gate, up and down: k, the output and up are computed again."""
    recipe = on_cpu(LLAMA, precision="bf16")
    most, second = (
        trace(recipe.model_copy(update={"recompute": recompute}), whole=True)
        for recompute in ("selective", SECOND)
    )
    tokens, width, k, up = 64, 512, 256, 640
    again = k + width + up
    assert alive_after_forward(most) - alive_after_forward(second) == 3 * 2 * tokens * again
    assert steady_sum(second, "flops") - steady_sum(most, "flops") == 3 * 2 * tokens * width * again


def test_what_is_only_added_is_not_kept() -> None:
    """A Llama block's last product is only added, so it is not kept.

    Kept are the other six and the attention, by their widths.
    """
    recipe = on_cpu(LLAMA, "native", precision="bf16")
    full, attention, selective, everything = (
        alive_after_forward(trace(recipe.model_copy(update={"recompute": recompute}), whole=True))
        for recompute in ("full", keeping("attention"), "selective", "none")
    )
    tokens, qkv, width, inner = 64, 512 + 2 * 256, 512, 640
    sums_of_scores, seed_and_offset = 64 * 8 * 4, 16
    kept = 3 * (tokens * width * 2 + sums_of_scores)
    assert attention - full == pytest.approx(kept, abs=3 * seed_and_offset)
    assert selective - attention == 3 * tokens * 2 * (qkv + width + 2 * inner)
    assert everything > selective


def alive_after_forward(ledger: Ledger) -> int:
    """Bytes alive when the first step's forward ends, of the layers that were traced."""
    alive: dict[int, int] = {}
    for event in ledger.events:
        if ledger.segments[event.segment].phase == "backward":
            break
        if event.kind == ALLOCATE:
            alive[event.storage] = ledger.storages[event.storage].num_bytes
        else:
            del alive[event.storage]
    return sum(alive.values())


def test_a_budget_is_spent_as_torchs_partitioner_spends_it() -> None:
    """A real module on this CPU, compiled after a virtual one, within the same share."""
    with functorch_config.patch(activation_memory_budget=0.3):
        alive = kept(step_of(SwiGlu, (1, TOKENS, E), compiled=True))
        theirs = kept_by_torch(SwiGlu, (1, TOKENS, E))
    whole = kept_by_torch(SwiGlu, (1, TOKENS, E))
    assert sum(alive.values()) - TOKENS * E * 4 - CUBLAS_WORKSPACE == theirs
    assert theirs <= whole * 0.31


def equal_heads_only(q: Any, k: Any, v: Any) -> int:
    """torch 2.11's count of attention: 2 products over all pairs, and key heads as many as query heads."""
    b, h, s_q, d = q
    assert h == k[1] == v[1], "shapes are incompatible"
    return 2 * b * h * s_q * k[2] * d + 2 * b * h * s_q * k[2] * v[3]


def test_a_recipes_budget_reaches_the_compiler_which_weighs_grouped_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flash attention is kept as other operations are, by the FLOPs that torch counts for it."""
    monkeypatch.setattr(flop_counter, "sdpa_flop_count", equal_heads_only)
    q_bhsd, kv_bksd = (2, 8, 16, 4), (2, 2, 32, 4)
    with grouped_heads_counted():
        assert flop_counter.sdpa_flop_count(q_bhsd, kv_bksd, kv_bksd) == 2 * 2 * 2 * 8 * 16 * 32 * 4
    assert flop_counter.sdpa_flop_count is equal_heads_only
    config = PLAIN | {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 1}
    recipe = on_cpu(config, "native", precision="bf16", compile="block", attention="flash")
    alive = []
    for share in (0.9, 0.1):
        ledger = trace(recipe.model_copy(update={"recompute": Budget(budget=share)}))
        alive.append(alive_after_forward(ledger))
        flops = dict.fromkeys(("init", "first", "steady"), 0.0)
        for op in ledger.ops:
            flops[ledger.segments[op.segment].step] += op.flops
        # To count them the partitioner runs operations, on fakes of its own.
        assert flops["first"] == flops["steady"]
    assert alive[0] > alive[1]
    assert functorch_config.activation_memory_budget == 1.0


@pytest.mark.parametrize(
    ("name", "why"), [("silo", "no operation of PyTorch"), ("view", "its input's own memory")]
)
def test_operations_that_cannot_be_kept_are_named(name: str, why: str) -> None:
    with pytest.raises(InputError, match=rf"recompute\.selective\.save = '{name}': .*{why}"):
        assemble(on_cpu(LLAMA, "native", recompute=keeping("mm", name)), torch.device("cpu"))


def test_lists_that_mean_the_same_are_the_same_recipe() -> None:
    one, other = (
        Recipe(model=ModelSpec(config="gpt2"), recompute=keeping(*save))
        for save in (("mm", "silu"), ("silu", "mm", "mm"))
    )
    assert one.id == other.id
