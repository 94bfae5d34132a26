"""Each technique against the control: what must stay equal does, and what it is for happens."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention

from tiny_recipe import tiny_recipe
from tiny_step import CPU, FAMILIES, aot_eager, trajectory
from trainfit.models.layers import layer_lists
from trainfit.spec.recipe import Adapter, Batch, ModelSpec, Optimizer, Recipe
from trainfit.step import Step, assemble


def gradients(step: Step) -> dict[str, torch.Tensor]:
    """Of one forward and backward, without an update."""
    found: dict[str, torch.Tensor] = {}

    def on_phase(phase: str) -> None:
        if phase == "optimizer":
            found.update((n, p.grad.clone()) for n, p in step.model.named_parameters() if p.grad is not None)

    step(step.random_batches(), on_phase)
    return found


def blocks_of(step: Step) -> list[torch.nn.Module]:
    return [block for _, blocks in layer_lists(step.model) for block in blocks]


# -- recomputation


@pytest.mark.parametrize("code", ["hf", "native"])
def test_recomputation_changes_neither_loss_nor_gradients(code: Any):
    control, recomputed = (assemble(tiny_recipe(code, recompute=word), CPU) for word in ("none", "full"))
    plain, again = gradients(control), gradients(recomputed)
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert trajectory(tiny_recipe(code))[1] == trajectory(tiny_recipe(code, recompute="full"))[1]


@pytest.mark.parametrize("code", ["hf", "native"])
@pytest.mark.parametrize(("recompute", "runs"), [("none", 1), ("full", 2)])
def test_recomputation_runs_each_block_twice(recompute: Any, runs: int, code: Any):
    step = assemble(tiny_recipe(code, recompute=recompute), CPU)
    calls = dict.fromkeys(range(len(blocks_of(step))), 0)
    for index, block in enumerate(blocks_of(step)):

        def count(*_: Any, index: int = index) -> None:
            calls[index] += 1

        block.mlp.register_forward_pre_hook(count)  # pyright: ignore
    step(step.random_batches())
    assert calls == {0: runs, 1: runs}


# -- accumulation


def test_accumulated_micro_batches_equal_one_large_batch():
    large = assemble(tiny_recipe(batch=Batch(micro=6, seq=16)), CPU)
    small = assemble(tiny_recipe(batch=Batch(micro=2, seq=16, accumulate=3)), CPU)
    batches = small.random_batches()
    joined = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    for _ in range(3):
        torch.testing.assert_close(small(batches), large([joined]), rtol=1e-6, atol=1e-6)
    for mine, other in zip(small.model.parameters(), large.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-6)


# -- optimizers


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_optimizer_in_backward_equals_the_ordinary_update(name: Any):
    asked = Optimizer(name=name, lr=1e-2)
    ordinary, expected = trajectory(tiny_recipe(optimizer=asked))
    hooked, found = trajectory(tiny_recipe(optimizer=asked.model_copy(update={"in_backward": True})))
    assert found == pytest.approx(expected, rel=1e-6)
    for mine, other in zip(hooked.model.parameters(), ordinary.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)
    assert len(hooked.optimizers) == len(list(hooked.model.parameters()))
    assert len(ordinary.optimizers) == 1


def test_optimizer_in_backward_leaves_no_gradients():
    step = assemble(tiny_recipe(optimizer=Optimizer(in_backward=True)), CPU)
    assert gradients(step) == {}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_implementations_agree(name: Any):
    runs = [
        trajectory(tiny_recipe(optimizer=Optimizer(name=name, lr=1e-2, implementation=implementation)))
        for implementation in ("forloop", "foreach", "fused")
    ]
    assert runs[1][1] == pytest.approx(runs[0][1], rel=1e-5)
    assert runs[2][1] == pytest.approx(runs[0][1], rel=1e-5)
    flags = [(run.optimizers[0].defaults["foreach"], run.optimizers[0].defaults["fused"]) for run, _ in runs]
    assert flags == [(False, False), (True, False), (False, True)]


def test_adafactor_keeps_a_row_and_a_column_and_with_momentum_a_whole_moment():
    """Sizes from the paper's Algorithm 4: n + m of an n x m matrix; with beta1, n x m more, here fp32."""
    plain, _ = trajectory(tiny_recipe(precision="bf16", optimizer=Optimizer(name="adafactor")), 1)
    weight = plain.model.get_parameter("model.layers.0.mlp.gate_proj.weight")
    assert isinstance(plain.optimizers[0], torch.optim.Adafactor)
    state = plain.optimizers[0].state[weight]
    assert sorted(value.numel() for value in state.values()) == [1, 32, 64]

    moved, _ = trajectory(
        tiny_recipe(precision="bf16", optimizer=Optimizer(name="adafactor", momentum=0.9)), 1
    )
    weight = moved.model.get_parameter("model.layers.0.mlp.gate_proj.weight")
    state = moved.optimizers[0].state[weight]
    assert state["exp_avg"].shape == (64, 32)
    assert state["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(
    "asked",
    [
        Optimizer(name="sgd", lr=0.5),
        Optimizer(name="sgd", lr=0.1, momentum=0.9),
        Optimizer(name="adafactor", lr=0.05),
        Optimizer(name="adafactor", lr=0.05, momentum=0.9),
        Optimizer(name="adamw", lr=1e-2),
    ],
    ids=str,
)
def test_every_optimizer_learns_one_batch(asked: Optimizer):
    step = assemble(tiny_recipe(optimizer=asked), CPU)
    batches = step.random_batches()
    found = [step(batches).item() for _ in range(20)]
    assert found[-1] < found[0] - 0.2


# -- precision


@pytest.mark.parametrize(
    ("precision", "weights", "logits"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("amp-bf16", torch.float32, torch.bfloat16),
        ("amp-fp16", torch.float32, torch.float16),
    ],
)
def test_dtypes_of_weights_logits_and_loss(precision: Any, weights: torch.dtype, logits: torch.dtype):
    step = assemble(tiny_recipe(precision=precision), CPU)
    seen: list[torch.dtype] = []
    step.model.register_forward_hook(lambda module, args, output: seen.append(output.logits.dtype))
    assert step.loss(step.random_batches()[0]).dtype == torch.float32
    assert seen == [logits]
    assert {parameter.dtype for parameter in step.model.parameters()} == {weights}
    assert {gradient.dtype for gradient in gradients(step).values()} == {weights}


@pytest.mark.parametrize("precision", ["bf16", "amp-bf16", "amp-fp16"])
def test_half_precision_follows_fp32(precision: Any):
    expected = trajectory(tiny_recipe())[1]
    assert trajectory(tiny_recipe(precision=precision))[1] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_the_scaler_skips_a_step_that_overflows(implementation: Any):
    step = assemble(
        tiny_recipe(precision="amp-fp16", optimizer=Optimizer(implementation=implementation)), CPU
    )
    assert step.scaler is not None
    step(step.random_batches())
    step.scaler.load_state_dict(step.scaler.state_dict() | {"scale": 2.0**127})
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    step(step.random_batches())
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    assert step.scaler.get_scale() == 2.0**126
    step.scaler.load_state_dict(step.scaler.state_dict() | {"scale": 2.0**16})
    step(step.random_batches())
    assert not all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))


# -- attention


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("attention", ["flash", "math", "sdpa", "efficient", "cudnn"])
def test_only_the_named_backend_is_allowed_while_blocks_run(attention: Any, recompute: Any):
    step = assemble(tiny_recipe(precision="bf16", attention=attention, recompute=recompute), CPU)
    allowed: list[set[str]] = []
    probe = blocks_of(step)[0].mlp  # pyright: ignore
    probe.register_forward_pre_hook(lambda *_: allowed.append(enabled_backends()))  # pyright: ignore
    before = enabled_backends()
    if attention in ("efficient", "cudnn"):
        with pytest.raises(RuntimeError, match="No viable backend"):
            step(step.random_batches())
    else:
        step(step.random_batches())
        expected = before if attention == "sdpa" else {attention}
        assert allowed == [expected] * (2 if recompute == "full" else 1)
    assert enabled_backends() == before


def enabled_backends() -> set[str]:
    cuda = torch.backends.cuda
    flags = {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
    }
    return {name for name, on in flags.items() if on}


def test_eager_attention_never_calls_sdpa_and_agrees_with_it(monkeypatch: pytest.MonkeyPatch):
    expected = trajectory(tiny_recipe())[1]
    calls: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return scaled_dot_product_attention(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    assert trajectory(tiny_recipe(attention="eager"))[1] == pytest.approx(expected, rel=1e-5)
    assert calls == []
    assert trajectory(tiny_recipe(attention="math"))[1] == pytest.approx(expected, rel=1e-5)
    assert calls != []


# -- LoRA


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", torch.float32), ("base", torch.bfloat16)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_lora_trains_only_its_own_weights(dtype: Any, expected: torch.dtype, recompute: Any):
    """The count is Hu et al.'s: rank x (in + out) a linear layer, 512 in + out a layer here."""
    recipe = tiny_recipe(
        precision="bf16",
        recompute=recompute,
        adapter=Adapter(kind="lora", rank=4, dtype=dtype),
        optimizer=Optimizer(lr=1e-2),
    )
    step = assemble(recipe, CPU)
    trainable = {name: p for name, p in step.model.named_parameters() if p.requires_grad}
    assert sum(parameter.numel() for parameter in trainable.values()) == 4 * 512 * 2
    assert {parameter.dtype for parameter in trainable.values()} == {expected}
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    found = [step(step.random_batches()).item() for _ in range(10)]
    assert found[-1] < found[0]
    for name, parameter in step.model.named_parameters():
        assert torch.equal(parameter, before[name]) != (name in trainable), name


def test_lora_starts_as_the_base_does():
    """B starts at zero, so the first loss is the base model's."""
    base = trajectory(tiny_recipe(), 1)[1]
    assert trajectory(tiny_recipe(adapter=Adapter(kind="lora", rank=4)), 1)[1] == base


def test_lora_alpha_is_the_rank_unless_given():
    for alpha, scaling in ((None, 1.0), (16, 4.0)):
        step = assemble(tiny_recipe(adapter=Adapter(kind="lora", rank=4, alpha=alpha)), CPU)
        found = {m.scaling["default"] for m in step.model.modules() if hasattr(m, "lora_A")}  # pyright: ignore
        assert found == {scaling}


def test_lora_on_native_adapts_the_blocks_linear_layers():
    """qkv 32 x 64, out 32 x 32, up (with gate) 32 x 128, down 64 x 32: in + out is 416 a layer."""
    recipe = tiny_recipe("native", precision="bf16", adapter=Adapter(kind="lora", rank=4))
    step = assemble(recipe, CPU)
    trainable = {name for name, parameter in step.model.named_parameters() if parameter.requires_grad}
    assert sum(step.model.get_parameter(name).numel() for name in trainable) == 4 * 416 * 2
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    for _ in range(2):
        step(step.random_batches())
    for name, parameter in step.model.named_parameters():
        assert torch.equal(parameter, before[name]) != (name in trainable), name
    # Nothing but the adapters needs a gradient before the first of them: the embedding's output needs none.
    grads_needed: list[bool] = []
    blocks_of(step)[0].register_forward_pre_hook(
        lambda block, args: grads_needed.append(args[0].requires_grad)
    )
    step(step.random_batches())
    assert grads_needed == [False]


def test_lora_targets_by_name():
    step = assemble(tiny_recipe(adapter=Adapter(kind="lora", rank=2, targets=("q_proj", "v_proj"))), CPU)
    adapted = {
        name.split(".")[-1] for name, module in step.model.named_modules() if hasattr(module, "lora_A")
    }
    assert adapted == {"q_proj", "v_proj"}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_recompute_and_adapt(family: str):
    """Recomputation changes no loss and LoRA starts as the base does, whatever the family's own code is."""
    model = ModelSpec(config=FAMILIES[family])
    plain = Recipe(model=model, batch=Batch(micro=2, seq=8), precision="fp32")
    expected = trajectory(plain, 3)[1]
    assert trajectory(plain.model_copy(update={"recompute": "full"}), 3)[1] == expected
    lora = plain.model_copy(update={"adapter": Adapter(kind="lora", rank=2), "recompute": "full"})
    step, found = trajectory(lora, 3)
    assert found[0] == expected[0]
    trainable = [name for name, parameter in step.model.named_parameters() if parameter.requires_grad]
    assert trainable
    assert all("lora_" in name for name in trainable)
    assert not any("lm_head" in name or "embed_out" in name for name in trainable)


# -- compile (aot_eager: the capture and the autograd split are the real ones, no C++ is built)


@pytest.mark.parametrize("code", ["hf", "native"])
@pytest.mark.parametrize(
    "fields",
    [
        {"compile": "block"},
        {"compile": "model"},
        {"compile": "block", "recompute": "full"},
        {"compile": "block", "precision": "amp-bf16"},
        {"compile": "model", "optimizer": Optimizer(in_backward=True)},
        {"compile": "block", "adapter": Adapter(kind="lora", rank=4)},
        {"compile": "block", "attention": "math"},
    ],
    ids=str,
)
def test_compiled_equals_eager_in_one_graph(fields: dict[str, Any], code: Any):
    """Ten equal blocks share a graph, past dynamo's limit of eight recompilations.

    With LoRA alone the first block has its own: its input, the frozen embedding's output, needs no gradient.
    """
    torch._dynamo.reset()
    counters.clear()
    eager = trajectory(tiny_recipe(code, 10, **{**fields, "compile": False}), 2)[1]
    assert trajectory(tiny_recipe(code, 10, **fields), 2, compiler=aot_eager)[1] == pytest.approx(
        eager, rel=1e-5
    )
    assert counters["stats"]["unique_graphs"] == (2 if "adapter" in fields else 1)
    assert not counters["graph_break"]


def test_the_compiler_gets_the_blocks_or_the_model():
    given: list[torch.nn.Module] = []
    step = assemble(tiny_recipe(compile="block"), CPU, compiler=given.append)
    assert given == blocks_of(step)
    given.clear()
    step = assemble(tiny_recipe(compile="model"), CPU, compiler=given.append)
    assert given == [step.model]


def test_contexts_are_left_when_the_model_fails():
    before = enabled_backends()
    step = assemble(tiny_recipe(attention="math"), CPU)
    with pytest.raises(IndexError):
        step([{"input_ids": torch.tensor([[128]]), "labels": torch.tensor([[0]])}])
    assert enabled_backends() == before


@pytest.mark.slow
def test_the_default_compiler_agrees_with_eager():
    torch._dynamo.reset()
    expected = trajectory(tiny_recipe(), 2)[1]
    assert trajectory(tiny_recipe(compile="block"), 2)[1] == pytest.approx(expected, rel=1e-5)
