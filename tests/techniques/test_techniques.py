"""Each technique against the control: what must stay equal does, and what it is for happens."""

from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention

from tiny_recipe import tiny_recipe
from tiny_step import CPU, FAMILIES, aot_eager, gradients, trajectory
from trainfit.models.layers import layer_lists
from trainfit.spec.recipe import Adapter, Batch, ModelSpec, Optimizer, Recipe
from trainfit.step import Step, assemble
from virtual_runs import plain


def blocks_of(step: Step) -> list[torch.nn.Module]:
    return [block for _, blocks in layer_lists(step.model) for block in blocks]


# -- recomputation


@pytest.mark.parametrize("code", ["hf", "native"])
def test_recomputation_runs_each_block_twice_and_changes_no_loss(code: Any):
    losses = []
    for recompute, runs in (("none", 1), ("full", 2)):
        step = assemble(tiny_recipe(code, recompute=recompute), CPU)
        calls: list[int] = []
        for index, block in enumerate(blocks_of(step)):
            note = partial(lambda calls, index, *_: calls.append(index), calls, index)
            block.mlp.register_forward_pre_hook(note)  # pyright: ignore
        losses.append([step(step.random_batches(index)).item() for index in range(2)])
        assert sorted(calls) == sorted([0, 1] * runs * 2)
    assert losses[0] == losses[1]


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
    _, found = gradients(tiny_recipe(precision=precision))
    assert {gradient.dtype for gradient in found.values()} == {weights}


def test_half_precision_follows_fp32():
    expected = trajectory(tiny_recipe())[1]
    for precision in ("amp-bf16", "amp-fp16"):
        assert trajectory(tiny_recipe(precision=precision))[1] == pytest.approx(expected, rel=2e-3)
    # PyTorch 2.11 draws other weights in bf16 than in fp32.
    step = assemble(tiny_recipe(precision="bf16"), CPU)
    step.model.load_state_dict(assemble(tiny_recipe(), CPU).model.state_dict())
    losses = [step(step.random_batches(index)).item() for index in range(len(expected))]
    assert losses == pytest.approx(expected, rel=2e-3)


# -- attention


@pytest.mark.parametrize("attention", ["flash", "math", "sdpa", "efficient", "cudnn"])
def test_only_the_named_backend_is_allowed_while_blocks_run(attention: Any):
    step = assemble(tiny_recipe(precision="bf16", attention=attention, recompute="full"), CPU)
    allowed: list[set[str]] = []
    mlp = blocks_of(step)[0].mlp  # pyright: ignore
    mlp.register_forward_pre_hook(lambda *_: allowed.append(enabled_backends()))  # pyright: ignore
    before = enabled_backends()
    if attention in ("efficient", "cudnn"):
        with pytest.raises(RuntimeError, match="No viable backend"):
            step(step.random_batches())
    else:
        step(step.random_batches())
        assert allowed == [before if attention == "sdpa" else {attention}] * 2
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


@pytest.mark.parametrize(
    ("code", "dtype", "built", "inputs_and_outputs"),
    [
        ("hf", "fp32", torch.float32, 512),
        ("hf", "base", torch.bfloat16, 512),
        ("native", "fp32", torch.float32, 416),
    ],
)
def test_lora_trains_only_its_own_weights(code: Any, dtype: Any, built: torch.dtype, inputs_and_outputs: int):
    """The count is Hu et al.'s: rank x (in + out) a linear layer; native joins qkv, and gate with up."""
    adapter, optimizer = Adapter(kind="lora", rank=4, dtype=dtype), Optimizer(lr=1e-2)
    recipe = tiny_recipe(code, precision="bf16", recompute="full", adapter=adapter, optimizer=optimizer)
    step = assemble(recipe, CPU)
    trainable = {name: p for name, p in step.model.named_parameters() if p.requires_grad}
    assert sum(parameter.numel() for parameter in trainable.values()) == 4 * 2 * inputs_and_outputs
    assert {parameter.dtype for parameter in trainable.values()} == {built}
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    found = [step(step.random_batches()).item() for _ in range(10)]
    assert found[-1] < found[0]
    for name, parameter in step.model.named_parameters():
        assert torch.equal(parameter, before[name]) != (name in trainable), name


def test_before_a_native_models_first_adapter_nothing_needs_a_gradient():
    step = assemble(tiny_recipe("native", adapter=Adapter(kind="lora", rank=4)), CPU)
    needed: list[bool] = []
    blocks_of(step)[0].register_forward_pre_hook(lambda block, args: needed.append(args[0].requires_grad))
    step(step.random_batches())
    assert needed == [False]


def test_lora_alpha_is_the_rank_unless_given_and_targets_are_named():
    for alpha, scaling in ((None, 1.0), (16, 4.0)):
        adapter = Adapter(kind="lora", rank=4, alpha=alpha, targets=("q_proj", "v_proj"))
        step = assemble(tiny_recipe(adapter=adapter), CPU)
        adapted = {name: m for name, m in step.model.named_modules() if hasattr(m, "lora_A")}
        assert {m.scaling["default"] for m in adapted.values()} == {scaling}  # pyright: ignore
        assert {name.split(".")[-1] for name in adapted} == {"q_proj", "v_proj"}


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


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        ("hf", {"compile": "model"}),
        ("native", {"compile": "model", "optimizer": Optimizer(in_backward=True)}),
        ("hf", {"compile": "block", "recompute": "full"}),
        ("hf", {"compile": "block", "precision": "amp-bf16"}),
        ("hf", {"compile": "block", "adapter": Adapter(kind="lora", rank=4)}),
        ("hf", {"compile": "block", "adapter": Adapter(kind="prompt", tokens=5)}),
        ("native", {"compile": "model", "adapter": Adapter(kind="p-tuning", tokens=5)}),
        ("hf", {"compile": "model", "adapter": Adapter(kind="prefix", tokens=5)}),
        ("native", {"compile": "block", "adapter": Adapter(kind="prefix", tokens=5)}),
        ("native", {"compile": "block", "attention": "math"}),
    ],
    ids=str,
)
def test_compiled_equals_eager_in_one_graph(fresh_compiler: None, fields: dict[str, Any], code: Any):
    """The first block has its own where its input, a frozen embedding's output, needs no gradient."""
    recipe = tiny_recipe(code, 3 if fields["compile"] == "block" else 1, **fields)
    eager = trajectory(recipe.model_copy(update={"compile": False}), 2)[1]
    assert trajectory(recipe, 2, compiler=aot_eager)[1] == pytest.approx(eager, rel=1e-5)
    first_differs = "adapter" in fields and (code, fields["adapter"].kind) in (
        ("hf", "lora"),
        ("native", "prefix"),
    )
    assert counters["stats"]["unique_graphs"] == (2 if first_differs else 1)
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
def test_the_default_compiler_agrees_with_eager(fresh_compiler: None):
    """Of layers of few kernels, without vectors: their C++ compiles in a third of the time."""
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    expected = trajectory(plain(2, precision="fp32"), 2)[1]
    # To learn which vectors the CPU has, Inductor compiles and loads six libraries.
    with config.patch({"cpp.simdlen": 1, "cpp.vec_isa_ok": False}):
        compiled = trajectory(plain(2, precision="fp32", compile="block"), 2)[1]
    valid_vec_isa_list.cache_clear()
    assert compiled == pytest.approx(expected, rel=1e-5)
