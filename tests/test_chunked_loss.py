"""The chunked loss is the standard loss: same value, same gradients, same FLOPs, a part of the memory."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CONFIG_MAPPING

from tiny_recipe import tiny_recipe
from trainfit.kernels.chunked_cross_entropy import Head, chunk_rows, linear_cross_entropy
from trainfit.measure.process import forked
from trainfit.measure.run import measure
from trainfit.models.language_head import PLAIN, SCALED, SOFT_CAPPED
from trainfit.predict.estimate import predict
from trainfit.predict.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Hardware, ModelSpec, Optimizer, Recipe
from trainfit.step import Step, assemble
from trainfit.techniques import registry
from virtual_runs import recipe_of, steady, steady_sum

CPU = torch.device("cpu")
LORA = Adapter(kind="lora", rank=4)

# -- the function


def usual(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
    """The definition, all logits at once, in the precision of its inputs (the loss at least fp32)."""
    logits = F.linear(hidden, head.weight, head.bias) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), targets, ignore_index=-100)


def inputs(dtype: torch.dtype, bias: bool = False, n: int = 37, e: int = 16, v: int = 50) -> Any:
    generator = torch.Generator().manual_seed(1)
    hidden, weight, offset = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((n, e), (v, e), (v,))
    )
    targets = torch.randint(v, (n,), generator=generator)
    targets[[3, n - 1]] = -100
    return hidden, weight, offset if bias else None, targets


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 0.02)]
)
def test_loss_and_gradients_are_the_definitions(
    dtype: torch.dtype, error: float, bias: bool, scale: float, softcap: float | None
):
    hidden, weight, offset, targets = inputs(dtype, bias)
    head = Head(weight, offset, scale, softcap)
    given = [t for t in (hidden, weight, offset) if t is not None]
    expected, found = usual(hidden, head, targets), linear_cross_entropy(hidden, head, targets, rows=8)
    assert found.item() == pytest.approx(expected.item(), rel=error)
    for want, got in zip(
        torch.autograd.grad(3 * expected, given), torch.autograd.grad(3 * found, given), strict=True
    ):
        assert got.dtype == want.dtype
        assert (got - want).abs().max() <= error * want.abs().max()


def test_gradients_are_differences_of_the_loss():
    """Central differences in fp64 along a random direction; the chunks do not divide the tokens."""
    hidden, weight, offset, targets = inputs(torch.float64, bias=True, n=11, e=5, v=7)
    given = (hidden, weight, offset)
    directions = [torch.randn_like(t) for t in given]

    def loss(step: float) -> Tensor:
        h, w, b = (t + step * d for t, d in zip(given, directions, strict=True))
        return linear_cross_entropy(h, Head(w, b, 0.7, 2.0), targets, rows=4, expected_gradient=0.3)

    found = torch.autograd.grad(loss(0.0), given)
    slope = sum((g * d).sum() for g, d in zip(found, directions, strict=True))
    assert slope == pytest.approx(((loss(1e-6) - loss(-1e-6)) / 2e-6).item(), rel=1e-7)


def test_what_needs_no_gradient_gets_none():
    hidden, weight, _, targets = inputs(torch.float32)
    linear_cross_entropy(hidden, Head(weight.detach()), targets).backward()
    assert hidden.grad is not None
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, Head(weight), targets).requires_grad


def test_tokens_that_are_all_ignored_have_no_loss():
    hidden, weight, _, targets = inputs(torch.float32)
    assert linear_cross_entropy(hidden, Head(weight), torch.full_like(targets, -100)).isnan()


def test_a_second_backward_is_refused():
    hidden, weight, _, targets = inputs(torch.float32)
    loss = linear_cross_entropy(hidden, Head(weight), targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="first backward"):
        loss.backward()


@pytest.mark.parametrize(("told", "kept"), [(65536.0, True), (1.0, False)])
def test_a_scale_said_in_advance_keeps_small_fp16_gradients(told: float, kept: bool):
    """A loss scaler multiplies before gradients are rounded to fp16; so do we if we are told by how much."""
    hidden, weight, _, targets = inputs(torch.float32, n=4096, v=3000)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = linear_cross_entropy(0.001 * hidden, Head(weight), targets, expected_gradient=told)
    (65536.0 * loss).backward()
    found = hidden.grad.clone()
    hidden.grad = None
    usual(0.001 * hidden, Head(weight), targets).backward()
    error = (found / 65536.0 - hidden.grad).norm() / hidden.grad.norm()
    assert (error < 2e-3) == kept


@pytest.mark.parametrize(
    ("tokens", "hidden", "vocabulary", "rows"),
    [
        (300, 2048, 128256, 300),
        (3072, 2048, 128256, 1024),  # never fewer than 1024 tokens
        (65536, 4096, 32000, 9368),  # as many logits as hidden values (8388 tokens), in seven equal chunks
        (131072, 1024, 151936, 4096),  # at most 32 chunks
        (5000, 2048, 128256, 1256),  # four of equal size, up to a multiple of 8
    ],
)
def test_how_large_a_chunk_is(tokens: int, hidden: int, vocabulary: int, rows: int):
    assert chunk_rows(tokens, hidden, vocabulary) == rows


@pytest.mark.parametrize(("chunks", "error"), [(1, 0.0031), (8, 0.0042), (32, 0.0065)])
def test_bf16_rounds_the_weights_gradient_once_a_chunk(chunks: int, error: float):
    """What the module's text says of it, against fp64; the usual way's own rounding is that of one chunk."""
    hidden, weight, _, targets = inputs(torch.bfloat16, n=2048, e=32, v=64)
    exact = torch.autograd.grad(usual(hidden.double(), Head(weight.double()), targets), weight)[0].double()
    loss = linear_cross_entropy(hidden, Head(weight), targets, rows=2048 // chunks)
    found = torch.autograd.grad(loss, weight)[0].double()
    assert ((found - exact).norm() / exact.norm()).item() == pytest.approx(error, rel=0.03)


# -- models

SMALL = {
    "hidden_size": 32, "n_embd": 32, "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "num_attention_heads": 4,
    "n_head": 4, "num_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "ffn_dim": 64, "n_inner": 64,
    "vocab_size": 97, "head_dim": 8, "max_position_embeddings": 64, "n_positions": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "rotary_dim": 8, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "kv_lora_rank": 8, "q_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
OF_FAMILY: dict[str, dict[str, Any]] = {
    "opt": {"word_embed_proj_dim": 16},
    "deepseek_v2": {"num_key_value_heads": 4, "head_dim": 4},
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0},
    "granitemoe": {"logits_scaling": 4.0},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
}


def family_recipe(family: str, loss: Any) -> Recipe:
    known = CONFIG_MAPPING[family]()
    config = {key: value for key, value in SMALL.items() if hasattr(known, key)}
    if family == "falcon":
        del config["head_dim"]
    config |= {"model_type": family, **OF_FAMILY.get(family, {})}
    return Recipe(
        model=ModelSpec(config=config), batch=Batch(micro=2, seq=16), precision="fp32", loss=loss,
        attention="eager",
    )  # fmt: skip


def gradients(step: Step) -> tuple[float, dict[str, Tensor]]:
    step.model.eval()  # no dropout
    layer = next(m for n, m in step.model.named_modules() if n in ("lm_head", "embed_out"))
    torch.nn.init.normal_(layer.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    (batch,) = step.random_batches()
    batch["labels"][0, :5] = -100
    loss = step.loss(batch)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in step.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", sorted(PLAIN | SOFT_CAPPED | SCALED.keys()))
def test_every_known_family_has_its_own_loss(family: str):
    (expected, usual_grads), (found, grads) = (
        gradients(assemble(family_recipe(family, loss), CPU)) for loss in ("standard", "chunked")
    )
    assert found == pytest.approx(expected, rel=2e-6)
    assert grads.keys() == usual_grads.keys()
    for name, grad in usual_grads.items():
        assert (grads[name] - grad).norm() <= 1e-4 * grad.norm() + 1e-7, name


@pytest.mark.parametrize("code", ["hf", "native"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"precision": "amp-bf16"},
        {"precision": "amp-fp16"},
        {"batch": Batch(micro=2, seq=16, accumulate=3)},
        {"batch": Batch(micro=2, seq=16, accumulate=3), "precision": "amp-fp16"},
        {"adapter": LORA},
        {"recompute": "full"},
        {"optimizer": Optimizer(name="sgd", in_backward=True)},
    ],
    ids=str,
)
def test_trains_as_the_standard_loss_does(fields: dict[str, Any], code: Any):
    runs = []
    for loss in ("standard", "chunked"):
        step = assemble(tiny_recipe(code, loss=loss, **fields), CPU)
        runs.append([step(step.random_batches(index)).item() for index in range(4)])
    rough = "amp" in str(fields)
    assert runs[1] == pytest.approx(runs[0], rel=2e-3 if rough else 1e-5)


@pytest.mark.parametrize("code", ["hf", "native"])
def test_the_whole_model_compiles_up_to_its_head(code: Any):
    torch._dynamo.reset()
    counters.clear()
    runs = []
    for compiled in (False, "model"):
        recipe = tiny_recipe(code, loss="chunked", compile=compiled)
        step = assemble(recipe, CPU, compiler=lambda module: module.compile(backend="aot_eager"))
        runs.append([step(step.random_batches(index)).item() for index in range(2)])
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


def test_evaluation_makes_no_gradients():
    step = assemble(tiny_recipe(loss="chunked"), CPU)
    with torch.no_grad():
        (batch,) = step.random_batches()
        loss = step.loss(batch)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(
        step.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss.item(), rel=1e-6
    )


# -- what is refused


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (tiny_recipe(loss="chunked", adapter=Adapter(kind="lora", targets=("lm_head",))), "no(t)? a? ?plain"),
        (recipe_of({"model_type": "xglm", "num_layers": 1}, loss="chunked"), "how xglm makes logits"),
        (
            family_recipe("qwen3_moe", "chunked").model_copy(
                update={
                    "model": ModelSpec(
                        config={"model_type": "qwen3_moe", "num_hidden_layers": 1, "output_router_logits": True,
                                "hidden_size": 32, "moe_intermediate_size": 8, "num_experts": 4, "vocab_size": 97}
                    )
                }
            ),
            "balances its experts",
        ),
    ],
    ids=["head adapted", "family", "router"],
)  # fmt: skip
def test_what_would_be_another_loss_is_refused(recipe: Recipe, words: str):
    with pytest.raises(InputError, match=words) as caught:
        assemble(recipe, torch.device("meta"))
    assert "use loss: standard" in str(caught.value)


@pytest.mark.parametrize("kind", ["prompt", "prefix", "p-tuning"])
def test_adapters_with_a_forward_of_their_own_are_refused(kind: Any):
    from trainfit.techniques import chunked_loss

    with pytest.raises(InputError, match="around the model's own forward"):
        chunked_loss.check(tiny_recipe(loss="chunked", adapter=Adapter(kind=kind)))


def test_the_registry_knows_it():
    registry.check(tiny_recipe(loss="chunked"))


# -- predicted

WIDE = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        ("hf", {"batch": Batch(micro=3, seq=1024, accumulate=2)}),
        ("native", {"precision": "amp-bf16"}),
        ("native", {"adapter": LORA}),
    ],
    ids=str,
)
def test_predicted_and_measured_bytes_are_equal_on_a_cpu(fields: dict[str, Any], code: Any):
    fields = {"batch": Batch(micro=3, seq=1024), "hardware": Hardware(gpu="cpu"), **fields}
    recipe = recipe_of(WIDE, code, loss="chunked", **fields)
    predicted, measured = predict(recipe), measure(recipe, steps=0, device="cpu", start=forked)
    assert measured.status == "done", measured.message
    assert predicted.phases == measured.phases


@pytest.mark.parametrize("code", ["hf", "native"])
def test_the_same_flops_and_no_copy_of_the_weights_gradient(code: Any):
    """3 chunks of 1024 tokens of a 2000-word vocabulary, bf16, on a virtual H200."""
    standard, chunked = (
        trace(recipe_of(WIDE, code, batch=Batch(micro=3, seq=1024), loss=loss))
        for loss in ("standard", "chunked")
    )
    assert chunked.ops_without_flops == ()
    for quantity in ("causal_flops", "model_flops"):
        assert steady_sum(chunked, quantity) == steady_sum(standard, quantity)
    largest = {
        loss: max(s.num_bytes for s in ledger.storages if s.op >= 0 and ledger.ops[s.op] in steady(ledger))
        for loss, ledger in (("standard", standard), ("chunked", chunked))
    }
    assert largest == {"standard": 3072 * 2000 * 4, "chunked": 1024 * 2000 * 4}
    head = 2000 * 32 * 2
    made = [
        s
        for s in chunked.storages
        if s.num_bytes == head and chunked.segments[chunked.ops[s.op].segment].step == "steady"
    ]
    assert len(made) == 2  # the head's gradient, and the embedding's
