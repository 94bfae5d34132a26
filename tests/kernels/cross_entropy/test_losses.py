"""The losses from hidden states, ``chunked`` and ``fused``, train as the standard loss does, or refuse.

Numerics of single rows, kernels included, are in test_loss_rows.py.
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from loss_runs import LORA, WIDE, family_recipe, gradients, inputs
from tiny_recipe import tiny_recipe
from trainfit.catalog.model_types import model_types
from trainfit.kernels.cross_entropy import fused
from trainfit.kernels.cross_entropy.chunked import Head, chunk_rows, linear_cross_entropy
from trainfit.kernels.cross_entropy.fused import (
    fused_linear_cross_entropy,
    fused_rows,
    plain_linear_cross_entropy,
)
from trainfit.kernels.cross_entropy.terms import Terms
from trainfit.ledger.ledger import Ledger
from trainfit.measurement.run import measure
from trainfit.prediction.predict import predict
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Hardware, Optimizer
from trainfit.step import assemble
from trainfit.techniques import registry
from trial_start import forked
from virtual_runs import recipe_of, steady, steady_sum

CPU = torch.device("cpu")
LOSSES = {"chunked": linear_cross_entropy, "fused": fused_linear_cross_entropy}
TERMS = [Terms(), Terms(label_smoothing=0.1), Terms(z_loss=1e-2), Terms(0.2, 1e-2, ignore_index=7)]


@pytest.fixture(params=LOSSES)
def loss_of(request: pytest.FixtureRequest) -> Any:
    return LOSSES[request.param]


# -- the functions


def results(loss: Any, given: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the loss and the gradients of three times it."""
    return [loss.detach(), *torch.autograd.grad(3 * loss, given)]


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 0.02)]
)
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (0.25, 3.0)])
@pytest.mark.parametrize("variant", ["chunked", "chunked with a bias", *TERMS], ids=str)
def test_loss_and_gradients_are_the_definitions(
    variant: str | Terms, scale: float, softcap: float | None, dtype: torch.dtype, error: float
):
    terms = variant if isinstance(variant, Terms) else Terms()
    hidden, weight, bias, targets = inputs(dtype, bias=variant == "chunked with a bias")
    targets[targets == -100] = terms.ignore_index
    head, given = Head(weight, bias, scale, softcap), (hidden, weight, *([] if bias is None else [bias]))
    run = partial(fused_linear_cross_entropy, terms=terms) if variant is terms else linear_cross_entropy
    wanted = results(plain_linear_cross_entropy(hidden, head, targets, terms), given)
    for want, got in zip(wanted, results(run(hidden, head, targets, rows=8), given), strict=True):
        assert got.dtype == want.dtype
        assert (got - want).abs().max() <= error * want.abs().max()


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_gradients_of_the_definition_are_differences(terms: Terms):
    hidden, weight, _, targets = inputs(torch.float64, n=5, e=3, v=9)
    targets[targets == -100] = terms.ignore_index

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return plain_linear_cross_entropy(h, Head(w, None, 0.7, 2.0), targets, terms)

    assert torch.autograd.gradcheck(loss, (hidden, weight))


def test_an_expected_scale_keeps_small_fp16_gradients():
    """A loss scaler multiplies before gradients are rounded to fp16; so does a loss that knows the scale."""
    hidden, weight, _, targets = inputs(torch.float32, n=2048, v=3000)
    wanted = torch.autograd.grad(plain_linear_cross_entropy(0.001 * hidden, Head(weight), targets), hidden)[0]
    errors = []
    for scale in (65536.0, 1.0):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = linear_cross_entropy(0.001 * hidden, Head(weight), targets, expected_gradient=scale)
        found = torch.autograd.grad(65536.0 * loss, hidden)[0] / 65536.0
        errors.append(((found - wanted).norm() / wanted.norm()).item())
    assert errors[0] < 2e-3 < errors[1]


def test_chunk_sizes():
    for size, rows in {
        (300, 2048, 128256): 300,
        (3072, 2048, 128256): 1024,  # at least 1024 tokens
        (65536, 4096, 32000): 9368,  # as many logits as hidden values (8388 tokens), in seven equal chunks
        (131072, 1024, 151936): 4096,  # at most 32 chunks
        (5000, 2048, 128256): 1256,  # four of equal size, up to a multiple of 8
    }.items():
        assert chunk_rows(*size) == rows
    for size, rows in {
        (8192, 131072, torch.bfloat16): 2048,  # 512 MiB
        (8192, 151936, torch.bfloat16): 2048,  # 594 MiB; 1,767 tokens have 512
        (8192, 262144, torch.bfloat16): 1024,
        (65536, 50304, torch.bfloat16): 4096,  # 5,336 tokens, nearer to 4,096 than to 8,192 by ratio
        (65536, 32000, torch.bfloat16): 8192,
        (8192, 128256, torch.float32): 1024,
        (5000, 128256, torch.bfloat16): 2048,
        (300, 128256, torch.bfloat16): 300,
        (1000, 10**7, torch.bfloat16): 128,  # at least a tile
        (0, 128256, torch.bfloat16): 1,
    }.items():
        assert fused_rows(*size) == rows
    largest = max(v * 2 * fused_rows(2**20, v, torch.bfloat16) for v in range(1000, 300_000, 7))
    assert largest <= 1.42 * fused.LOGITS_BYTES


@pytest.mark.parametrize(
    ("loss", "chunks", "error"),
    [("chunked", 1, 0.0031), ("chunked", 8, 0.0042), ("chunked", 32, 0.0065),
     ("fused", 1, 0.0027), ("fused", 4, 0.0032)],
)  # fmt: skip
def test_bf16_rounds_the_gradient_of_the_weight_once_per_chunk(loss: str, chunks: int, error: float):
    """The relative errors that the modules state, against fp64 (of chunked: rounded to bf16)."""
    hidden, weight, _, targets = inputs(torch.bfloat16, n=2048, e=32, v=64)
    wide = weight.detach().double().requires_grad_()
    exact = torch.autograd.grad(plain_linear_cross_entropy(hidden.double(), Head(wide), targets), wide)[0]
    if loss == "chunked":
        exact = exact.bfloat16().double()
    found = LOSSES[loss](hidden, Head(weight), targets, rows=2048 // chunks)
    off = torch.autograd.grad(found, weight)[0].double() - exact
    assert (off.norm() / exact.norm()).item() == pytest.approx(error, rel=0.05)


def test_lengths_of_zero_one_and_primes(loss_of: Any):
    weight = torch.randn(53, 8).requires_grad_()
    assert loss_of(torch.empty(0, 8), Head(weight), torch.empty(0, dtype=torch.long), rows=1).isnan()
    for n in (1, 131):
        hidden, targets = torch.randn(n, 8).requires_grad_(), torch.arange(n) % 53
        wanted = results(plain_linear_cross_entropy(hidden, Head(weight), targets), (hidden, weight))
        for rows in (None, 7):
            found = results(loss_of(hidden, Head(weight), targets, rows=rows), (hidden, weight))
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_only_wanted_gradients_are_computed(loss_of: Any):
    hidden, weight, _, targets = inputs(torch.float32)
    loss_of(hidden, Head(weight.detach()), targets).backward()
    assert hidden.grad is not None
    with torch.no_grad():
        assert not loss_of(hidden, Head(weight), targets).requires_grad


def test_ignored_tokens_have_no_loss_and_no_gradient(loss_of: Any):
    hidden, weight, _, targets = inputs(torch.float32)
    loss = loss_of(hidden, Head(weight), torch.full_like(targets, -100))
    assert loss.isnan()
    loss.backward(retain_graph=True)
    assert not hidden.grad.any()
    assert not weight.grad.any()
    with pytest.raises(RuntimeError, match="first backward"):
        loss.backward()


@pytest.mark.parametrize("label", [-1, -(2**40), 50, 2**31])
def test_an_invalid_label_makes_the_loss_nan(loss_of: Any, label: int):
    """PyTorch's loss raises on a CPU and asserts on a GPU."""
    hidden, weight, _, targets = inputs(torch.float32)
    targets[20] = label
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(hidden @ weight.t(), targets)
    found = loss_of(hidden, Head(weight), targets, rows=8)
    assert found.isnan()
    found.backward()
    assert weight.grad.isnan().all()
    with torch.no_grad():
        assert loss_of(hidden, Head(weight), targets, rows=8).isnan()


def test_the_sum_over_chunks_is_rounded_once(loss_of: Any):
    """32 chunks: as near to fp64 as one fp32 number can be."""
    errors = []
    for seed in range(20):
        torch.manual_seed(seed)
        hidden, weight, targets = torch.randn(512, 16), torch.randn(99, 16) / 4, torch.randint(99, (512,))
        exact = loss_of(hidden.double(), Head(weight.double()), targets)
        errors.append((loss_of(hidden, Head(weight), targets, rows=16).double() / exact - 1).abs().item())
    assert max(errors) < torch.finfo(torch.float32).eps
    assert sum(errors) / 20 < 0.5 * torch.finfo(torch.float32).eps


# -- models

FAMILIES = [
    *(("chunked", family) for family in (row.name for row in model_types().values() if row.logits)),
    *(("fused", family) for family in ("llama", "gemma2", "cohere", "granite", "gpt2", "qwen3_moe")),
]


@pytest.mark.parametrize(("loss", "family"), FAMILIES)
def test_every_known_family_keeps_its_loss(loss: str, family: str):
    (expected, usual_grads), (found, grads) = (
        gradients(assemble(family_recipe(family, each), CPU)) for each in ("standard", loss)
    )
    assert found == pytest.approx(expected, rel=2e-6)
    assert grads.keys() == usual_grads.keys()
    for name, grad in usual_grads.items():
        assert (grads[name] - grad).norm() <= 1e-4 * grad.norm() + 1e-7, name


def losses(loss: Any, code: Any, **fields: Any) -> list[float]:
    recipe = tiny_recipe(code, loss=loss, **fields)
    step = assemble(recipe, CPU, compiler=lambda module: module.compile(backend="aot_eager"))
    return [step(step.random_batches(index)).item() for index in range(3)]


ACCUMULATED = Batch(micro=2, seq=16, accumulate=3)
FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("hf", {}),
    ("native", {}),
    ("hf", {"precision": "amp-bf16"}),
    ("native", {"precision": "amp-fp16"}),
    ("hf", {"batch": ACCUMULATED}),
    ("native", {"batch": ACCUMULATED, "precision": "amp-fp16"}),
    ("hf", {"adapter": LORA}),
    ("native", {"recompute": "full"}),
    ("hf", {"optimizer": Optimizer(name="sgd", in_backward=True)}),
]


@pytest.mark.parametrize(("code", "fields"), FIELDS, ids=str)
def test_they_train_as_the_standard_loss_does(code: str, fields: dict[str, Any]):
    expected, *runs = (losses(loss, code, **fields) for loss in ("standard", *LOSSES))
    for found in runs:
        assert found == pytest.approx(expected, rel=2e-3 if "amp" in str(fields) else 1e-5)


@pytest.mark.parametrize(("code", "loss"), [("hf", "chunked"), ("native", "fused")])
def test_the_whole_model_compiles(code: str, loss: str, fresh_compiler: None):
    assert losses(loss, code, compile="model") == pytest.approx(losses("standard", code), rel=1e-5)
    if loss == "chunked":
        assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("code", ["hf", "native"])
def test_of_negative_labels_only_the_ignored_one_trains(code: str):
    for loss in LOSSES:
        step = assemble(tiny_recipe(code, loss=loss, batch=Batch(micro=1, seq=8)), CPU)
        (batch,) = step.random_batches()
        batch["labels"][0, 3:] = -100
        with torch.no_grad():
            found = step.loss(batch)
            expected = step.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss.item()
        assert not found.requires_grad
        assert found.item() == pytest.approx(expected, rel=1e-6)
        batch["labels"][0, 5] = -1
        assert step.loss(batch).isnan()


# -- predictions


@pytest.mark.parametrize(
    ("code", "fields"),
    [("hf", {"batch": Batch(micro=3, seq=1024, accumulate=2)}), ("native", {"precision": "amp-bf16"}),
     ("native", {"adapter": LORA}), ("native", {"loss": "fused"})],
    ids=str,
)  # fmt: skip
def test_predicted_and_measured_bytes_are_equal_on_a_cpu(fields: dict[str, Any], code: Any):
    """Except for the fused operator's PyTorch implementation, which allocates PLAIN_ROWS rows at a time."""
    fields = {"batch": Batch(micro=3, seq=1024), "hardware": Hardware(gpu="cpu"), "loss": "chunked"} | fields
    recipe = recipe_of(WIDE, code, **fields)
    predicted, measured = predict(recipe), measure(recipe, steps=0, device="cpu", start=forked)
    assert measured.status == "done", measured.message
    if fields["loss"] == "chunked":
        assert predicted.phases == measured.phases
    else:
        beyond = measured.phases.steady.forward - predicted.phases.steady.forward
        assert 0 <= beyond <= 8 * fused.PLAIN_ROWS * 2000 * 4


@pytest.mark.parametrize("vocabulary", [64, 61])
@pytest.mark.parametrize("gradient", [0.25, 0.75])
def test_a_kept_gradient_is_added_by_the_product(gradient: float, vocabulary: int):
    """Of one chunk, also where another gradient comes than the expected one; rounded once."""
    hidden, weight, _, targets = inputs(torch.bfloat16, n=300, e=48, v=vocabulary)
    wide = weight.detach().double().requires_grad_()
    exact = torch.autograd.grad(plain_linear_cross_entropy(hidden.double(), Head(wide), targets), wide)[0]
    found = list[Tensor]()
    torch.manual_seed(0)
    kept = torch.randn_like(weight, requires_grad=False)
    expected = kept.double() + gradient * exact
    for head in (Head(weight, kept=kept), Head(weight)):
        h = hidden.detach().requires_grad_()
        loss = fused.fused_linear_cross_entropy(h, head, targets, expected_gradient=0.25)
        (gradient * loss).backward()
        assert (weight.grad is None) == (head.kept is not None)
        assert h.grad is not None
        found.append(h.grad)
    assert torch.equal(*found)
    torch.testing.assert_close(kept.double(), expected, rtol=2**-8, atol=5e-4)


def test_a_kept_gradient_of_several_chunks_is_autograds():
    hidden, weight, _, targets = inputs(torch.bfloat16, n=300, e=48, v=64)
    kept = torch.zeros_like(weight, requires_grad=False)
    loss = fused.fused_linear_cross_entropy(hidden, Head(weight, kept=kept), targets, rows=128)
    loss.backward()
    assert weight.grad is not None
    assert not kept.any()
    assert fused.is_one_chunk(5632, 3584, 152064, torch.bfloat16)  # 2,048 and the hidden size
    assert not fused.is_one_chunk(5633, 3584, 152064, torch.bfloat16)


def test_no_tokens_add_nothing_to_a_kept_gradient():
    hidden, weight, _, targets = inputs(torch.float32, n=8, e=48, v=64)
    kept = torch.ones_like(weight, requires_grad=False)
    loss = fused.fused_linear_cross_entropy(hidden[:0], Head(weight, kept=kept), targets[:0])
    loss.backward()
    assert loss.isnan()
    assert weight.grad is None
    assert torch.equal(kept, torch.ones_like(kept))


def largest_bytes(ledger: Ledger) -> int:
    """Return the largest storage that a steady step allocates."""
    return max(s.num_bytes for s in ledger.storages if s.op >= 0 and ledger.ops[s.op] in steady(ledger))


def test_flops_are_equal_and_logits_are_those_of_a_chunk(monkeypatch: pytest.MonkeyPatch):
    """3 chunks of 1024 tokens of a 2000-word vocabulary, bf16, on a virtual H200."""
    monkeypatch.setattr(fused, "LOGITS_BYTES", 1024 * 2000 * 2)
    standard, chunked, ours = (
        trace(recipe_of(WIDE, "native", batch=Batch(micro=3, seq=1024), loss=loss))
        for loss in ("standard", *LOSSES)
    )
    for ledger in (chunked, ours):
        assert ledger.ops_without_flops == ()
        for quantity in ("causal_flops", "model_flops"):
            assert steady_sum(ledger, quantity) == steady_sum(standard, quantity)
    assert largest_bytes(standard) == 3072 * 2000 * 4
    assert largest_bytes(chunked) == 1024 * 2000 * 4
    assert largest_bytes(ours) == 1024 * 2000 * 2
    made = [
        s
        for s in chunked.storages
        if s.num_bytes == 2000 * 32 * 2 and chunked.segments[chunked.ops[s.op].segment].step == "steady"
    ]
    assert len(made) == 2  # the gradients of head and embedding: no copy


def test_the_expected_gradient_is_the_one_that_comes():
    """With accumulation too, so scaling by it moves no byte."""
    ledger = trace(recipe_of(WIDE, "native", batch=Batch(micro=1, seq=64, accumulate=2), loss="fused"))
    found = [op for op in steady(ledger) if op.name.startswith("trainfit.multiply_unless_one_")]
    assert found
    assert sum(op.num_bytes for op in found) == 0


# -- refusals

BALANCED = {
    "model_type": "qwen3_moe", "num_hidden_layers": 1, "output_router_logits": True, "hidden_size": 32,
    "moe_intermediate_size": 8, "num_experts": 4, "vocab_size": 97,
}  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_a_model_with_another_loss_is_refused(loss: Any):
    head = Adapter(kind="lora", targets=("lm_head",))
    xglm = recipe_of({"model_type": "xglm", "num_layers": 1}, loss=loss)
    for recipe, words in (
        (tiny_recipe(loss=loss, adapter=head), "no(t)? a? ?plain.*use loss: standard"),
        (xglm, "how xglm computes logits.*use loss: standard"),
        (recipe_of(BALANCED, loss=loss), "balances its experts.*use loss: standard"),
        *([(family_recipe("phi", "fused"), "has a bias; use loss: chunked")] if loss == "fused" else []),
    ):
        with pytest.raises(InputError, match=words) as caught:
            assemble(recipe, torch.device("meta"))
        assert f"loss = '{loss}'" in str(caught.value)
    registry.check(tiny_recipe(loss=loss))
    for kind in ("prompt", "prefix", "p-tuning"):
        with pytest.raises(InputError, match="around the model's own forward"):
            registry.check(tiny_recipe(loss=loss, adapter=Adapter(kind=kind)))
