"""``attention: triton`` in whole steps: results, refusals, and the ledger of the virtual GPU.

On a CPU the operator runs in PyTorch. What the kernels compute is in test_flash_attention.py, what a GPU
allocates in test_attention_triton_cuda.py.
"""

import sys
from typing import Any

import pytest
import torch

from evidence.scripts.accuracy import truth_values
from kernel_runs import interpreted_loops
from tiny_recipe import TINY_LLAMA, tiny_recipe
from trainfit.catalog.load import model_config
from trainfit.kernels.custom_op import has_module
from trainfit.kernels.flash_attention import op as flash_attention
from trainfit.ledger.ledger import ALLOCATE, MIDDLE, Ledger
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Offload, Recipe
from trainfit.spec.recompute import Budget, Every, Selective
from trainfit.step import Step, assemble
from trainfit.techniques import registry
from trainfit.virtual.cuda.flops import count
from virtual_runs import PLAIN, recipe_of, steady, with_layers

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORWARD_OP, BACKWARD_OP = "trainfit.flash_attention.default", "trainfit.flash_attention_backward.default"


def gradients(recipe: Recipe, **how: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step."""
    step: Step = assemble(recipe, CPU, **how)
    found: dict[str, torch.Tensor] = {}

    def on_phase(phase: str) -> None:
        if phase == "optimizer":
            found.update((n, p.grad.clone()) for n, p in step.model.named_parameters() if p.grad is not None)

    return step(step.random_batches(), on_phase).item(), found


def grad(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def assert_as_eager(fields: dict[str, Any], code: str, atol: float = 1e-6, **how: Any) -> None:
    kept = {key: value for key, value in fields.items() if key not in ("compile", "recompute", "offload")}
    expected_loss, expected = gradients(tiny_recipe(code, **kept, attention="eager"))
    loss, found = gradients(tiny_recipe(code, **fields, attention="triton"), **how)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=atol)


SAVE_ATTENTION = Selective.model_validate({"selective": {"save": ("attention",)}})
LORA = Adapter(kind="lora", rank=4)
STEPS: list[tuple[str, dict[str, Any]]] = [
    ("native", {}),
    ("hf", {}),
    ("native", {"recompute": "full"}),
    ("hf", {"recompute": "selective"}),
    ("native", {"recompute": SAVE_ATTENTION}),
    ("hf", {"recompute": Every(every=2)}),
    ("native", {"batch": Batch(micro=2, seq=17, accumulate=2)}),
    ("hf", {"adapter": LORA}),
    ("native", {"recompute": "full", "offload": Offload(activations=True)}),
]


@interpreted_loops
@pytest.mark.parametrize(("code", "fields"), STEPS, ids=str)
def test_loss_and_gradients_are_those_of_eager_attention(code: str, fields: dict[str, Any]) -> None:
    assert_as_eager(fields, code)


COMPILED: list[tuple[str, dict[str, Any]]] = [
    ("hf", {"compile": "block"}),
    ("native", {"compile": "block", "recompute": "selective"}),
    ("native", {"compile": "model", "recompute": Budget(budget=0.3)}),
]


@interpreted_loops
@pytest.mark.parametrize(("code", "fields"), COMPILED, ids=str)
def test_compiled_steps_too(code: str, fields: dict[str, Any], fresh_compiler: None) -> None:
    assert_as_eager(fields, code, compiler=lambda module: module.compile(backend="aot_eager", fullgraph=True))


@pytest.mark.parametrize(
    ("code", "precision"), [("native", "bf16"), ("hf", "amp-bf16"), ("native", "amp-fp16")]
)
def test_low_precision_is_as_near_to_fp32_as_eager_attention(code: str, precision: Any) -> None:
    weights = assemble(tiny_recipe(code, precision="bf16"), CPU).model.state_dict()

    def found(attention: Any, precision: Any) -> tuple[float, torch.Tensor]:
        step = assemble(tiny_recipe(code, attention=attention, precision=precision), CPU)
        step.model.load_state_dict(weights)
        loss = step.loss(step.random_batches()[0])
        loss.backward()
        return loss.item(), torch.cat([grad(p).flatten().float() for p in step.model.parameters()])

    exact, eager, ours = found("eager", "fp32"), found("eager", precision), found("triton", precision)
    assert ours[0] == pytest.approx(exact[0], rel=2e-3)
    assert (ours[1] - exact[1]).norm() <= 1.5 * (eager[1] - exact[1]).norm()


def test_autocast_casts_the_inputs_and_no_product_inside() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    with torch.autocast("cpu", dtype=BF16):
        mixed = flash_attention.flash_attention(q, k.half(), v, True)
    assert mixed.dtype == BF16
    assert torch.equal(
        mixed, flash_attention.flash_attention(q.bfloat16(), k.half().bfloat16(), v.bfloat16(), True)
    )


# -- refusals


def refused(config: dict[str, Any], match: str, code: Any = "hf", **fields: Any) -> None:
    with pytest.raises(InputError, match=match) as error:
        trace(recipe_of(config, code, **{"attention": "triton", **fields}))
    assert "\n" not in str(error.value)


def test_what_a_model_needs_and_the_kernels_do_not_do_is_refused_in_one_line() -> None:
    refused(with_layers("gpt2", 2), r"model\.config\.attn_pdrop = 0\.1.*nothing out; use attention: sdpa")
    refused(TINY_LLAMA | {"attention_dropout": 0.2}, r"model\.config\.attention_dropout = 0\.2")
    refused(with_layers("gemma-2-2b", 2), r"model\.config\.attn_logit_softcapping = 50\.0.*caps no scores")
    refused(with_layers("bloom-560m", 2), "attention of its own.*sdpa or eager")
    refused(with_layers("falcon-7b", 2), "attention of its own")
    refused(with_layers("mistral-7b-v0.1", 2) | {"sliding_window": 32}, "needs a mask: a sliding window")
    refused(with_layers("deepseek-v2-lite", 2), "head size 192 with values of 128")
    refused(TINY_LLAMA | {"head_dim": 640}, "head size 640.*up to 512")
    sinks = {"model_type": "gpt_oss", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 32,
    "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2,
             "vocab_size": 128}  # fmt: skip
    refused(sinks, r"attention sinks \(s_aux\)")


TINY_NATIVE = {
    "model_type": "trainfit", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 64,
}  # fmt: skip


def test_native_refuses_what_is_added_to_the_scores() -> None:
    refused(with_layers("mistral-7b-v0.1", 2) | {"sliding_window": 32}, "ALiBi, a sliding window", "native")
    alibi = {**TINY_NATIVE, "position_embedding": "alibi"}
    refused(alibi, "ALiBi, a sliding window", "native")
    refused(alibi, "ALiBi, a sliding window", "native", compile="block")


def test_a_window_longer_than_the_sequence_runs() -> None:
    config = with_layers("mistral-7b-v0.1", 2)
    assert config["sliding_window"] > 64
    assert ops_named(trace(recipe_of(config, "hf", attention="triton")), FORWARD_OP)


def test_a_machine_without_triton_is_refused(monkeypatch: Any) -> None:
    assert has_module("trainfit.kernels")
    assert not has_module("trainfit.no_such_file")
    assert not has_module("no_such_package.within")
    recipe = tiny_recipe(attention="triton", precision="bf16")
    monkeypatch.setattr("trainfit.kernels.custom_op.has_module", lambda name: False)
    others = ({"loss": "fused"}, {"loss": "chunked"}, {"block_kernels": "triton"})
    for each in (recipe, *(tiny_recipe(**fields) for fields in others)):
        registry.check_device(each, "cpu")
        with pytest.raises(InputError, match="Triton is not installed"):
            registry.check_device(each, "cuda")


# -- the virtual GPU

HEADS_128 = TINY_LLAMA | {"hidden_size": 512, "head_dim": 128, "num_hidden_layers": 5}
B, S, H, K, D = 2, 200, 4, 2, 128
ROWS = 256  # 200 rounded up to whole tiles of 128


def attention_trace(code: Any = "hf", deterministic: bool = False, **fields: Any) -> Ledger:
    recipe = recipe_of(
        HEADS_128 | fields.pop("config", {}),
        code,
        **{"attention": "triton", "batch": Batch(micro=B, seq=S)} | fields,
    )
    return trace(recipe, deterministic=deterministic)


def ops_named(ledger: Ledger, name: str, phase: str | None = None) -> list[Any]:
    return [
        op for op in steady(ledger) if op.name == name and phase in (None, ledger.segments[op.segment].phase)
    ]


def memory_of(ledger: Ledger, name: str) -> list[tuple[str, int]]:
    """Allocations (+) and, within the operation, frees (-) of its middle layer's steady step, in order."""
    at = next(
        i
        for i, op in enumerate(ledger.ops)
        if op.name == name and op.group == MIDDLE and op in steady(ledger)
    )
    own = {i for i, storage in enumerate(ledger.storages) if storage.op == at}
    allocations = [
        n for n, event in enumerate(ledger.events) if event.storage in own and event.kind == ALLOCATE
    ]
    scratch = {i for i in own if "/scratch" in ledger.storages[i].path}
    return [
        ("+" if event.kind == ALLOCATE else "-", ledger.storages[event.storage].num_bytes)
        for n, event in enumerate(ledger.events)
        if (n in allocations) or (event.storage in scratch)
    ]


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    return attention_trace()


def test_the_ledger_has_what_the_kernels_save_and_allocate(ledger: Ledger) -> None:
    """The Gluon kernels: gradients, an fp32 dQ and two fp32 values, both for each padded row."""
    sums, rows = B * H * ROWS * D * 4, 2 * B * H * ROWS * 4
    q, kv = B * S * H * D * 2, B * S * K * D * 2
    assert memory_of(ledger, FORWARD_OP) == [("+", q), ("+", B * H * S * 4)]
    assert memory_of(ledger, BACKWARD_OP) == [
        ("+", kv), ("+", kv), ("+", sums), ("+", rows), ("+", q), ("-", sums), ("-", rows),
    ]  # fmt: skip
    assert ledger.ops_without_flops == ()


def test_repeatable_kernels_need_no_sum_of_queries_gradients() -> None:
    found = memory_of(attention_trace(deterministic=True), BACKWARD_OP)
    assert sum(size for sign, size in found if sign == "+") == (
        B * S * (H + 2 * K) * D * 2 + 2 * B * H * ROWS * 4
    )


def test_wide_heads_take_three_passes_without_a_sum_of_queries_gradients() -> None:
    """Eight products, where one pass executes five; the forward is Gluon's."""
    d = 256
    ledger = attention_trace(config={"head_dim": d}, deterministic=True)
    q, kv, rows = B * S * H * d * 2, B * S * K * d * 2, 2 * B * H * ROWS * 4
    assert memory_of(ledger, BACKWARD_OP) == [("+", rows), ("+", kv), ("+", kv), ("+", q), ("-", rows)]
    ops = {op.name: op for op in ledger.ops if op.name in (FORWARD_OP, BACKWARD_OP)}
    assert {name: op.kernel for name, op in ops.items()} == {FORWARD_OP: "gluon", BACKWARD_OP: "passes"}
    assert ops[BACKWARD_OP].causal_flops == pytest.approx(4 * ops[FORWARD_OP].causal_flops)


def test_cudnns_backward_of_heads_of_256_has_its_workspace() -> None:
    """As in ``attention: cudnn``, and two 8-byte tensors for the state of no dropout."""
    fields = {"config": {"head_dim": 256}}
    ours, cudnn = attention_trace(**fields), attention_trace(**fields, attention="cudnn")
    found = memory_of(ours, BACKWARD_OP)
    name = "aten._scaled_dot_product_cudnn_attention_backward.default"
    assert found[:2] == [("+", 8), ("+", 8)]
    assert sorted(found[2:-2]) == sorted(memory_of(cudnn, name))
    assert found[-2:] == [("-", 8), ("-", 8)]
    (op,) = {op.kernel for op in ours.ops if op.name == BACKWARD_OP}
    assert op == "cudnn"
    forward, backward = (
        sum(op.causal_flops for op in ours.ops if op.name == one) for one in (FORWARD_OP, BACKWARD_OP)
    )
    assert backward == pytest.approx(2.5 * forward)


def test_predicting_needs_no_triton(monkeypatch: Any, ledger: Ledger) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"] + ["triton"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert memory_of(attention_trace("native"), BACKWARD_OP) == memory_of(ledger, BACKWARD_OP)
    odd = attention_trace(config={"head_dim": 80})
    assert memory_of(odd, BACKWARD_OP)[0][0] == "+"


KEPT = [
    ("hf", False, "full", True), ("hf", False, "selective", False), ("native", False, SAVE_ATTENTION, False),
    ("hf", "block", SAVE_ATTENTION, False), ("native", "model", "none", False),
]  # fmt: skip
"""Implementation, compile, recompute, and whether attention runs again in the backward."""


@pytest.mark.parametrize(("code", "compiled", "recompute", "again"), KEPT, ids=str)
def test_recomputation_can_keep_attention(code: str, compiled: Any, recompute: Any, again: bool) -> None:
    config = {"num_hidden_layers": 1}
    if code == "native":
        config = PLAIN | config | {"hidden_size": 512, "max_position_embeddings": S}
    ledger = attention_trace(code, recompute=recompute, compile=compiled, config=config)
    assert bool(ops_named(ledger, FORWARD_OP, "backward")) == again
    assert ops_named(ledger, BACKWARD_OP, "backward")


@pytest.mark.parametrize(("n", "m", "causal"), [(40, 40, False), (33, 50, True), (50, 33, True)])
def test_flops_count_the_pairs_that_are_seen(n: int, m: int, causal: bool) -> None:
    flash_attention.register()
    b, h, k, d = 2, 4, 2, 16
    q, kv = (torch.empty(b, heads, length, d, device="meta") for heads, length in ((h, n), (k, m)))
    seen = int(torch.ones(n, m).tril(m - n).sum()) if causal else n * m
    ops = torch.ops.trainfit
    forward = count(ops.flash_attention.default, (q, kv, kv, causal, 0.1), {}, None)
    backward = count(ops.flash_attention_backward.default, (q, q, kv, kv, q, None, causal, 0.1), {}, None)
    assert forward is not None
    assert backward is not None
    assert (forward.full, forward.causal) == (4 * b * h * d * n * m, 4 * b * h * d * seen)
    assert (backward.causal, backward.model_causal) == (10 * b * h * d * seen, 8 * b * h * d * seen)


def test_torchs_own_counter_knows_it() -> None:
    """By it the compiler's memory budget weighs what to compute again."""
    from torch.utils.flop_counter import FlopCounterMode

    q, kv = (torch.randn(1, heads, 32, 16, requires_grad=True) for heads in (4, 2))
    with FlopCounterMode(display=False) as counter:
        flash_attention.flash_attention(q, kv, kv, True).sum().backward()
    assert counter.get_total_flops() == (4 + 10) * 4 * 32 * 32 * 16


# -- the truth suite


def test_drawn_models_have_the_heads_that_the_table_says() -> None:
    for table in (truth_values.HF, truth_values.NATIVE):
        for d, names in table.items():
            for name in names:
                config = model_config(name)
                found = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
                assert found == d, name
