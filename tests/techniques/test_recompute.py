"""Recomputation: bitwise equal gradients, the predicted bytes, and no unnecessary work."""

from typing import Any

import peft  # noqa: F401
import pytest
import torch
import transformers.optimization  # noqa: F401 - a few tensors are made while these two are imported, the first time
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.utils import flop_counter

from compiled_blocks import CUBLAS_WORKSPACE, TOKENS, E, SwiGlu, kept, kept_by_torch, step_of
from trainfit.ledger.ledger import ALLOCATE, Ledger
from trainfit.measurement.process import forked
from trainfit.measurement.run import measure
from trainfit.prediction.estimate import predict
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Hardware, ModelSpec, Offload, Optimizer, Recipe
from trainfit.spec.recompute import Budget, Every, SavedOps, Selective  # fmt: skip
from trainfit.step import Step, assemble
from trainfit.techniques import registry
from trainfit.techniques.recompute.budget import grouped_heads_counted
from virtual_runs import recipe_of, steady_sum, sums, with_layers

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


def gradients(recipe: Recipe, backend: str | None = None) -> tuple[Tensor, list[Tensor]]:
    """The loss of one micro-batch and every trainable parameter's gradient, on this CPU."""

    def compiler(module: torch.nn.Module) -> None:
        assert backend is not None
        module.compile(backend=backend)

    torch._dynamo.reset()
    step = assemble(recipe, torch.device("cpu"), compiler=compiler)
    torch.manual_seed(1)  # of dropout
    return loss_of(step), [p.grad for p in step.model.parameters() if p.grad is not None]


def loss_of(step: Step) -> Tensor:
    (batch,) = step.random_batches()
    loss = step.loss(batch)
    step._backward(loss)
    return loss.detach()


def on_cpu(config: Any, implementation: Any = "hf", **fields: Any) -> Recipe:
    return recipe_of(
        config, implementation, **{"batch": Batch(micro=2, seq=32), "precision": "fp32", **fields}
    )


@pytest.mark.parametrize(
    "recompute", ["selective", keeping("attention", "silu"), Every(every=2), "full"], ids=str
)
@pytest.mark.parametrize("implementation", ["hf", "native"])
def test_gradients_are_equal_to_the_bit(implementation: str, recompute: Any) -> None:
    loss, wanted = gradients(on_cpu(LLAMA, implementation))
    again, found = gradients(on_cpu(LLAMA, implementation, recompute=recompute))
    assert torch.equal(loss, again)
    assert len(wanted) == len(found) > 20
    assert all(map(torch.equal, wanted, found))


@pytest.mark.parametrize(
    "recompute", ["selective", keeping("native_dropout"), keeping("mm", "bernoulli"), Every(every=2)], ids=str
)
def test_dropout_repeats_itself_where_some_of_it_is_kept(recompute: Any) -> None:
    """A kept result of a random operation is not drawn again, and what is drawn after it must not notice."""
    _, wanted = gradients(on_cpu(GPT2))
    _, found = gradients(on_cpu(GPT2, recompute=recompute))
    assert all(map(torch.equal, wanted, found))


@pytest.mark.parametrize("recompute", ["selective", Every(every=2)], ids=str)
def test_an_adapter_inside_peft_learns_the_same(recompute: Any) -> None:
    _, wanted = gradients(on_cpu(LLAMA, adapter=LORA))
    _, found = gradients(on_cpu(LLAMA, adapter=LORA, recompute=recompute))
    assert len(found) == 2 * 7 * LLAMA["num_hidden_layers"]
    assert all(map(torch.equal, wanted, found))


@pytest.mark.parametrize(
    ("mode", "recompute"),
    [
        ("block", "selective"),
        ("block", Every(every=2)),
        ("model", Every(every=2)),
        ("model", Budget(budget=0.5)),
    ],
    ids=str,
)
def test_compiled_gradients_are_the_eager_ones(mode: Any, recompute: Any) -> None:
    """The partitioner's graphs, run operation by operation."""
    config = LLAMA | {"num_hidden_layers": 2}
    _, wanted = gradients(on_cpu(config, "native"))
    _, found = gradients(on_cpu(config, "native", recompute=recompute, compile=mode), "aot_eager")
    assert all(map(torch.equal, wanted, found))


CASES: dict[str, Recipe] = {
    "selective": on_cpu(LLAMA | {"num_hidden_layers": 5}, precision="bf16", recompute="selective"),
    "attention": on_cpu(LLAMA, "native", recompute=keeping("attention")),
    "dropout": on_cpu(GPT2, recompute=keeping("mm", "native_dropout")),
    "every": on_cpu(DEEP_LLAMA, "native", recompute=Every(every=2), precision="amp-bf16"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_real_cpu_holds_the_predicted_bytes(case: str) -> None:
    recipe = CASES[case].model_copy(update={"hardware": Hardware(gpu="cpu")})
    predicted, measured = predict(recipe), measure(recipe, steps=0, device="cpu", start=forked)
    assert measured.status == "done", measured.message
    assert predicted.phases == measured.phases


@pytest.mark.parametrize("case", ["selective", "every"])
def test_a_few_blocks_tell_what_all_do(case: str) -> None:
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


def test_what_is_only_added_is_not_kept() -> None:
    """A Llama block's last product is only added, so it is not kept.

    Kept are the other six and the attention, by their widths.
    """
    recipe = on_cpu(LLAMA, "native", precision="bf16")
    alive = {
        str(recompute): alive_after_forward(
            trace(recipe.model_copy(update={"recompute": recompute}), whole=True)
        )
        for recompute in ("full", keeping("attention"), "selective")
    }
    full, attention, selective = alive.values()
    tokens, qkv, width, inner = 64, 512 + 2 * 256, 512, 640
    sums_of_scores, seed_and_offset = 64 * 8 * 4, 16
    kept = 3 * (tokens * width * 2 + sums_of_scores)
    assert attention - full == pytest.approx(kept, abs=3 * seed_and_offset)
    assert selective - attention == 3 * tokens * 2 * (qkv + width + 2 * inner)


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


def test_memory_falls_with_what_is_kept() -> None:
    peaks = [
        predict(
            recipe_of("llama-3.2-1b", batch=Batch(micro=4, seq=1024), recompute=recompute), use_cache=False
        )
        for recompute in ("none", "selective", keeping("attention"), "full")
    ]
    found = [estimate.peak_allocated_bytes for estimate in peaks]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 4


@pytest.mark.parametrize("budget", [0.3, 0.6])
def test_a_budget_is_spent_as_torchs_partitioner_spends_it(budget: float) -> None:
    """A real module on this CPU, compiled after a virtual one, within the same share."""
    with functorch_config.patch(activation_memory_budget=budget):
        alive = kept(step_of(SwiGlu, (1, TOKENS, E), compiled=True))
        theirs = kept_by_torch(SwiGlu, (1, TOKENS, E))
    whole = kept_by_torch(SwiGlu, (1, TOKENS, E))
    assert sum(alive.values()) - TOKENS * E * 4 - CUBLAS_WORKSPACE == theirs
    assert theirs <= whole * (budget + 0.01)


def test_a_recipes_budget_reaches_the_virtual_compiler_and_leaves_no_trace_of_choosing() -> None:
    recipe = on_cpu(LLAMA, "native", precision="bf16", compile="block")
    alive = []
    for recompute in ("none", Budget(budget=0.5), Budget(budget=0.0)):
        ledger = trace(recipe.model_copy(update={"recompute": recompute}))
        alive.append(alive_after_forward(ledger))
        flops = {"init": 0, "first": 0, "steady": 0}
        for op in ledger.ops:
            flops[ledger.segments[op.segment].step] += op.flops
        assert (
            flops["first"] == flops["steady"]
        )  # To count them the partitioner runs operations, on fakes of its own.
    assert alive[0] > alive[1] > alive[2]
    assert functorch_config.activation_memory_budget == 1.0


def equal_heads_only(q: Any, k: Any, v: Any) -> int:
    """torch 2.11's count of attention: 2 products over all pairs, and key heads as many as query heads."""
    b, h, s_q, d = q
    assert h == k[1] == v[1], "shapes are incompatible"
    return 2 * b * h * s_q * k[2] * d + 2 * b * h * s_q * k[2] * v[3]


def test_a_budget_weighs_attention_with_grouped_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention is kept as other operations are, by the FLOPs that torch counts for it."""
    monkeypatch.setattr(flop_counter, "sdpa_flop_count", equal_heads_only)
    q_bhsd, kv_bksd = (2, 8, 16, 4), (2, 2, 32, 4)
    with grouped_heads_counted():
        assert flop_counter.sdpa_flop_count(q_bhsd, kv_bksd, kv_bksd) == 2 * 2 * 2 * 8 * 16 * 32 * 4
    assert flop_counter.sdpa_flop_count is equal_heads_only
    recipe = on_cpu(
        LLAMA, "native", precision="bf16", compile="block", attention="flash", hardware=Hardware()
    )
    alive = [
        alive_after_forward(trace(recipe.model_copy(update={"recompute": Budget(budget=share)})))
        for share in (0.9, 0.4, 0.1)
    ]
    assert alive[0] > alive[1] > alive[2]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"recompute": Budget(budget=0.5)},
         "recompute.budget = 0.5: only compiled code has a budget to keep to; set compile"),
        ({"recompute": "selective", "offload": Offload(activations=True)}, "set recompute: full"),
        ({"recompute": Every(every=2), "offload": Offload(weights=True),
          "optimizer": Optimizer(in_backward=True)},
         "set recompute: full"),
    ],
    ids=str,
)  # fmt: skip
def test_refused_in_one_line(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refusal:
        registry.check(on_cpu(LLAMA, **fields))
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


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
