"""The fused loss is its definition: value, gradients, terms, FLOPs and bytes; the kernel is its PyTorch body.

What holds for the chunked loss as well is in test_losses_in_chunks.py.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_runs import interpreted
from loss_runs import WIDE, family_recipe, inputs
from tiny_recipe import tiny_recipe
from trainfit.kernels.cross_entropy import fused, gradients_in_forward
from trainfit.kernels.cross_entropy.chunked import Head
from trainfit.kernels.cross_entropy.fused import (
    fused_linear_cross_entropy,
    fused_rows,
    plain_linear_cross_entropy,
)
from trainfit.kernels.cross_entropy.terms import Terms
from trainfit.measurement.process import forked
from trainfit.measurement.run import measure
from trainfit.prediction.estimate import predict
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Batch, Hardware
from trainfit.step import assemble
from virtual_runs import recipe_of, steady, steady_sum

CPU = torch.device("cpu")
TERMS = [Terms(), Terms(label_smoothing=0.1), Terms(z_loss=1e-2), Terms(0.2, 1e-2, ignore_index=7)]


def answers(loss: Any, given: tuple[Tensor, ...]) -> list[Tensor]:
    """The loss and the gradients of three times it."""
    return [loss.detach(), *torch.autograd.grad(3 * loss, given)]


# -- the function


@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_loss_and_gradients_are_the_definitions(
    dtype: torch.dtype, error: float, softcap: float | None, terms: Terms
):
    hidden, weight, _, targets = inputs(dtype)
    targets[targets == -100] = terms.ignore_index
    head = Head(weight, None, 0.25, softcap)
    wanted = answers(plain_linear_cross_entropy(hidden, head, targets, terms), (hidden, weight))
    found = answers(fused_linear_cross_entropy(hidden, head, targets, terms, rows=8), (hidden, weight))
    for want, got in zip(wanted, found, strict=True):
        assert got.dtype == want.dtype
        assert (got - want).abs().max() <= error * want.abs().max()


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_the_definitions_gradients_are_differences(terms: Terms):
    hidden, weight, _, targets = inputs(torch.float64, n=5, e=3, v=9)
    targets[targets == -100] = terms.ignore_index

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return plain_linear_cross_entropy(h, Head(w, None, 0.7, 2.0), targets, terms)

    assert torch.autograd.gradcheck(loss, (hidden, weight))


def test_bf16_errors_are_at_most_twice_the_usual_ways():
    """Against fp64 from the same bf16 inputs; 4 chunks, at the sizes of the module's text."""
    hidden, weight, _, targets = inputs(torch.bfloat16, n=2048, e=32, v=64)
    head, given = Head(weight), (hidden, weight)
    wide = tuple(t.detach().double().requires_grad_() for t in given)
    exact = answers(plain_linear_cross_entropy(wide[0], Head(wide[1]), targets), wide)
    usual = answers(plain_linear_cross_entropy(hidden, head, targets), given)
    found = answers(fused_linear_cross_entropy(hidden, head, targets, rows=512, expected_gradient=3.0), given)
    errors = [
        [((x.double() - e).norm() / e.norm()).item() for x, e in zip(way, exact, strict=True)]
        for way in (usual, found)
    ]
    assert all(ours <= 2 * theirs for theirs, ours in zip(*errors, strict=True)), errors
    assert errors[1][2] == pytest.approx(0.0032, rel=0.05)


@pytest.mark.parametrize("n", [1, 131])
def test_lengths_of_one_and_primes(n: int):
    hidden, weight = (torch.randn(k, 8).requires_grad_() for k in (n, 53))
    targets = torch.arange(n) % 53
    for rows in (None, 7):
        loss = fused_linear_cross_entropy(hidden, Head(weight), targets, rows=rows)
        expected = plain_linear_cross_entropy(hidden, Head(weight), targets)
        for want, got in zip(
            answers(expected, (hidden, weight)), answers(loss, (hidden, weight)), strict=True
        ):
            assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)


def test_no_tokens_at_all_have_no_loss():
    _, weight, _, _ = inputs(torch.float32)
    hidden = torch.empty(0, 16, requires_grad=True)
    assert fused_linear_cross_entropy(hidden, Head(weight), torch.empty(0, dtype=torch.long)).isnan()


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "dtype", "rows"),
    [
        (8192, 131072, torch.bfloat16, 2048),  # 512 MiB
        (8192, 128256, torch.bfloat16, 2048),
        (8192, 128256, torch.float32, 1024),
        (5000, 128256, torch.bfloat16, 1792),  # three, of equal size up to a multiple of 128
        (300, 128256, torch.bfloat16, 300),
        (1000, 10**7, torch.bfloat16, 128),  # never fewer than a tile
    ],
)
def test_how_large_a_chunk_is(tokens: int, vocabulary: int, dtype: torch.dtype, rows: int):
    assert fused_rows(tokens, vocabulary, dtype) == rows


# -- the kernel


def both(c: int, v: int, dtype: torch.dtype, terms: Terms, softcap: float, prepare: Any = None) -> list[Any]:
    """Losses and gradients of the kernel, of the body, and of the body in fp64 from equal logits (rows apart
    in memory)."""
    torch.manual_seed(v)
    y = (4 * torch.randn(c, v)).to(dtype)
    targets = torch.randint(v, (c,))
    targets[c // 2] = terms.ignore_index
    if prepare is not None:
        prepare(y, targets)
    factor = torch.tensor(0.5)
    results = []
    for run, kind in (
        (partial(fused.triton_cross_entropy, block=64), dtype),
        (fused.plain_cross_entropy, dtype),
        (fused.plain_cross_entropy, torch.float64),
    ):
        logits = torch.full((c, v + 3), 9.0, dtype=kind)[:, :v]
        logits.copy_(y)
        losses = run(
            logits, targets, factor.to(torch.promote_types(kind, torch.float32)), 0.5, softcap, terms, True
        )
        assert (logits._base[:, v:] == 9.0).all()  # what lies between rows is not ours
        results.append((losses, logits))
    return results


def certain(y: Tensor, targets: Tensor) -> None:
    """One token has all the probability: as the target, and against it; another is impossible."""
    y[0, 3], y[1, 3], y[2, 5] = 6e4, 6e4, -torch.inf
    targets[0], targets[1] = 3, 4


@interpreted
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_in_the_interpreter(dtype: torch.dtype, softcap: float, terms: Terms):
    for c, v in ((1, 1), (5, 64), (3, 131), (4, 257)):
        kernel, _, exact = both(c, v, dtype, terms, softcap)
        assert torch.allclose(kernel[0].double(), exact[0], rtol=2e-6, atol=1e-5)
        assert torch.allclose(
            kernel[1].double(), exact[1], rtol=1e-3 if dtype == torch.float16 else 1e-5, atol=2e-7
        )


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_certain_and_impossible_tokens(dtype: torch.dtype):
    for got, _, exact in [both(5, 131, dtype, Terms(), 0.0, certain)]:
        assert got[0].isfinite().all()
        assert got[1].isfinite().all()
        assert torch.allclose(got[0].double(), exact[0], rtol=1e-5)
        assert torch.allclose(got[1].double(), exact[1], rtol=1e-3, atol=1e-7)
        assert got[0][0] == 0
        assert got[0][1] == pytest.approx(3e4, rel=1e-3)


@interpreted
def test_a_target_outside_the_vocabulary_is_seen():
    y, targets = torch.randn(3, 40), torch.tensor([1, 40, -3])
    losses = fused.triton_cross_entropy(y, targets, torch.tensor(1.0), 1.0, 0.0, Terms(), True, block=64)
    assert losses.isnan().tolist() == [False, True, True]
    assert y.isnan().all(1).tolist() == [False, True, True]


def test_the_operation_says_what_it_writes():
    fused.register()
    y, targets = torch.randn(4, 9), torch.tensor([1, -100, 3, 8])
    arguments = (y, targets, torch.tensor(0.25), 1.0, 0.0, 0.1, 0.0, -100, True)
    torch.library.opcheck(torch.ops.trainfit.cross_entropy_, arguments)


# -- the multiplication by the gradient that comes in


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_multiplication_touches_all_or_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """More elements than all programs take at once, and no multiple of a block."""
    monkeypatch.setattr(gradients_in_forward, "PROGRAMS", 2)
    monkeypatch.setattr(gradients_in_forward, "BLOCK", 16)
    for numel in (1, 16, 100):
        x = torch.randn(numel).to(dtype)
        before, version = x.clone(), x._version
        gradients_in_forward.triton_multiply_unless_one(x, torch.tensor(1.0))
        assert torch.equal(x, before)
        gradients_in_forward.triton_multiply_unless_one(x, torch.tensor(0.3))
        assert torch.equal(x, before * torch.tensor(0.3))
        assert version == x._version


def test_the_multiplications_operation_keeps_the_rules():
    gradients_in_forward.register()
    for ratio in (1.0, 0.5):
        x = torch.arange(6.0).view(2, 3).t()
        torch.library.opcheck(torch.ops.trainfit.multiply_unless_one_, (x.clone(), torch.tensor(ratio)))
        torch.ops.trainfit.multiply_unless_one_(x, torch.tensor(ratio))
        assert torch.equal(x, ratio * torch.arange(6.0).view(2, 3).t())


def test_a_step_multiplies_its_gradients_by_one_for_nothing():
    """The expected gradient is the one that comes, with accumulation too: no byte is moved for it."""
    ledger = trace(recipe_of(WIDE, "native", batch=Batch(micro=1, seq=64, accumulate=2), loss="fused"))
    found = [op for op in steady(ledger) if op.name.startswith("trainfit.multiply_unless_one_")]
    assert found
    assert sum(op.num_bytes for op in found) == 0


# -- the technique


@pytest.mark.parametrize("code", ["hf", "native"])
def test_the_whole_model_compiles(code: Any, fresh_compiler: None):
    runs = []
    for loss in ("standard", "fused"):
        recipe = tiny_recipe(code, loss=loss, compile="model")
        step = assemble(recipe, CPU, compiler=lambda module: module.compile(backend="aot_eager"))
        runs.append([step(step.random_batches(index)).item() for index in range(3)])
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)


def test_a_bias_is_refused():
    with pytest.raises(InputError, match="has a bias; use loss: chunked") as caught:
        assemble(family_recipe("phi", "fused"), torch.device("meta"))
    assert "loss = 'fused'" in str(caught.value)


@pytest.mark.parametrize("code", ["hf", "native"])
def test_the_same_flops_and_one_chunks_logits(code: Any, monkeypatch: pytest.MonkeyPatch):
    """3 chunks of 1024 tokens of a 2000-word vocabulary, bf16, on a virtual H200."""
    monkeypatch.setattr(fused, "LOGITS_BYTES", 1024 * 2000 * 2)
    standard, ours = (
        trace(recipe_of(WIDE, code, batch=Batch(micro=3, seq=1024), loss=loss))
        for loss in ("standard", "fused")
    )
    assert ours.ops_without_flops == ()
    for quantity in ("causal_flops", "model_flops"):
        assert steady_sum(ours, quantity) == steady_sum(standard, quantity)
    assert max(s.num_bytes for s in ours.storages if s.op >= 0) == 1024 * 2000 * 2


def test_predicted_bytes_on_a_cpu_are_the_measured_but_for_the_bodys_own():
    """The PyTorch body of the operation works in rows of its own, which the fake one does not: 64 x 2000 x 4
    bytes each."""
    fields = {"batch": Batch(micro=3, seq=1024), "hardware": Hardware(gpu="cpu")}
    recipe = recipe_of(WIDE, "native", loss="fused", **fields)
    predicted, measured = predict(recipe), measure(recipe, steps=0, device="cpu", start=forked)
    assert measured.status == "done", measured.message
    beyond = measured.phases.steady.forward - predicted.phases.steady.forward
    assert 0 <= beyond <= 8 * fused.PLAIN_ROWS * 2000 * 4
