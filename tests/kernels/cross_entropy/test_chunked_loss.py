"""The chunked loss is the standard loss: same value, same gradients, same FLOPs, a part of the memory.

What holds for the fused loss as well is in test_losses_in_chunks.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from loss_runs import LORA, WIDE, inputs
from tiny_recipe import tiny_recipe
from trainfit.kernels.cross_entropy.chunked import Head, chunk_rows, linear_cross_entropy
from trainfit.kernels.cross_entropy.fused import plain_linear_cross_entropy
from trainfit.measurement.process import forked
from trainfit.measurement.run import measure
from trainfit.prediction.estimate import predict
from trainfit.prediction.trace import trace
from trainfit.spec.recipe import Batch, Hardware
from trainfit.step import assemble
from virtual_runs import recipe_of, steady, steady_sum

CPU = torch.device("cpu")

# -- the function


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
    expected, found = (
        plain_linear_cross_entropy(hidden, head, targets),
        linear_cross_entropy(hidden, head, targets, rows=8),
    )
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


@pytest.mark.parametrize(("expected_scale", "kept"), [(65536.0, True), (1.0, False)])
def test_an_expected_scale_keeps_small_fp16_gradients(expected_scale: float, kept: bool):
    """A loss scaler multiplies before gradients are rounded to fp16; so does this loss if it knows the
    scale."""
    hidden, weight, _, targets = inputs(torch.float32, n=4096, v=3000)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = linear_cross_entropy(0.001 * hidden, Head(weight), targets, expected_gradient=expected_scale)
    (65536.0 * loss).backward()
    found = hidden.grad.clone()
    hidden.grad = None
    plain_linear_cross_entropy(0.001 * hidden, Head(weight), targets).backward()
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
    exact = torch.autograd.grad(
        plain_linear_cross_entropy(hidden.double(), Head(weight.double()), targets), weight
    )[0].double()
    loss = linear_cross_entropy(hidden, Head(weight), targets, rows=2048 // chunks)
    found = torch.autograd.grad(loss, weight)[0].double()
    assert ((found - exact).norm() / exact.norm()).item() == pytest.approx(error, rel=0.03)


# -- models


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


# -- predicted


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
