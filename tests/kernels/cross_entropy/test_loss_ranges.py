"""Losses over the range of fp32, against PyTorch's: huge logits, infinities, NaN, and invalid labels."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_runs import interpreted
from loss_runs import inputs
from tiny_recipe import tiny_recipe
from trainfit.kernels.cross_entropy import chunked, fused
from trainfit.kernels.cross_entropy.chunked import Head, linear_cross_entropy
from trainfit.kernels.cross_entropy.fused import fused_linear_cross_entropy
from trainfit.kernels.cross_entropy.terms import Terms, cross_entropy_with_terms
from trainfit.spec.recipe import Batch
from trainfit.step import assemble

C, V = 6, 131
IGNORED = -100


def run_chunked(y: Tensor, targets: Tensor, softcap: float, terms: Terms) -> tuple[Tensor, Tensor]:
    ignored = targets == IGNORED
    results = []
    for row in range(len(y)):  # The chunk's loss is a sum: one row at a time.
        part = slice(row, row + 1)
        labels = chunked.Labels(
            targets[part, None].clamp(min=0), ignored[part, None], (~ignored[part, None]).to(y.dtype)
        )
        head = Head(y, None, 1.0, softcap or None)
        results.append(chunked.chunk_loss(y[part].clone(), labels, head, y.dtype, wants_gradient=True))
    losses, gradients = zip(*results, strict=True)
    return torch.stack(losses), torch.cat(gradients)


def run_operation(run: Any) -> Any:
    def losses_and_gradients(
        y: Tensor, targets: Tensor, softcap: float, terms: Terms
    ) -> tuple[Tensor, Tensor]:
        logits = y.clone()
        return run(logits, targets, torch.tensor(1.0, dtype=y.dtype), 1.0, softcap, terms, True), logits

    return losses_and_gradients


def triton(*arguments: Any) -> Tensor:
    return fused.triton_cross_entropy(*arguments, block=64)


run_plain, run_triton = run_operation(fused.plain_cross_entropy), run_operation(triton)
TERMS = [Terms(), Terms(label_smoothing=0.1), Terms(z_loss=1e-6), Terms(0.2, 1e-6)]
RUNS = [
    pytest.param(run_chunked, Terms(), id="chunked"),
    *(pytest.param(run_plain, terms, id=f"plain-{terms}") for terms in TERMS),
    *(pytest.param(run_triton, terms, id=f"triton-{terms}", marks=interpreted) for terms in TERMS),
]


def definition(x: Tensor, targets: Tensor, terms: Terms) -> Tensor:
    """Compute ``cross_entropy_with_terms`` without logsumexp, whose gradient has its own rounding error."""
    loss = F.cross_entropy(x, targets, label_smoothing=terms.label_smoothing)
    highest = x.detach().amax(1, keepdim=True)
    lse = highest + (x - highest).exp().sum(1, keepdim=True).log()
    return loss + terms.z_loss * lse.square().mean() if terms.z_loss else loss


def torchs(
    y: Tensor, targets: Tensor, softcap: float, terms: Terms, loss_of: Any = cross_entropy_with_terms
) -> tuple[Tensor, Tensor]:
    """Losses and gradients by PyTorch's operations, row by row, in the dtype of the logits."""
    y = y.clone().requires_grad_()
    x = softcap * torch.tanh(y / softcap) if softcap else y
    losses = torch.stack(
        [
            loss_of(x[row : row + 1], targets[row : row + 1], terms)
            if targets[row] != IGNORED
            else x.new_zeros(())
            for row in range(len(y))
        ]
    )
    return losses.detach(), torch.autograd.grad(losses.sum(), y)[0]


def logits(size: float, offset: float) -> tuple[Tensor, Tensor]:
    """Rows of size ``size`` around ``offset``: random, constant, tied at the top, target highest and
    lowest."""
    torch.manual_seed(3)
    y = torch.randn(C, V) * size + offset
    targets = torch.randint(V, (C,))
    y[1] = offset
    y[2, [7, 90]] = y[2].max()
    targets[2] = 7
    targets[3], targets[4] = y[3].argmax(), y[4].argmin()
    targets[5] = IGNORED
    return y, targets


HUGE = [
    pytest.param(run_chunked, Terms(), id="chunked"),
    *(pytest.param(run_plain, terms, id=f"plain-{terms}") for terms in TERMS),
    *(pytest.param(run_triton, terms, id=f"triton-{terms}", marks=interpreted) for terms in TERMS[::3]),
]


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("offset", [0.0, 1.0, -1.0], ids=["around 0", "high", "low"])
@pytest.mark.parametrize(("run", "terms"), HUGE)
def test_losses_and_gradients_of_huge_logits(run: Any, offset: float, softcap: float, terms: Terms):
    """As close to fp64 as PyTorch's fp32 is, for every power of ten that fp32 and the squared terms hold."""
    powers = (0, 5, 10) if run is run_triton else (0, 2, 4, 5, 6, 8, 10, 15)  # The interpreter is slow.
    for power in (*powers, 18 if terms.z_loss and not softcap else 30):
        size = 10.0**power
        for spread in {1.0, size}:
            y, targets = logits(spread, offset * size)
            exact = torchs(y.double(), targets, softcap, terms, loss_of=definition)
            usual = torchs(y, targets, softcap, terms)
            found = run(y, targets, softcap, terms)
            for got, theirs, want in zip(found, usual, exact, strict=True):
                # The rounding of a gradient follows its row's largest element.
                largest = want.abs() if want.dim() == 1 else want.abs().amax(1, keepdim=True)
                allowed = 4 * (theirs.double() - want).abs() + 4e-6 * largest + 1e-6
                assert ((got.double() - want).abs() <= allowed).all(), (power, spread)


def impossible(y: Tensor, targets: Tensor) -> None:
    """Set logits to minus infinity: some, the target's, all but the target's."""
    y[0, 5], targets[0] = -torch.inf, 4
    y[1, targets[1]] = -torch.inf
    y[2] = -torch.inf
    y[2, targets[2]] = 3.0


def unbounded(y: Tensor, targets: Tensor) -> None:
    """Set infinity at the target and elsewhere, NaN at both, and a row of minus infinity."""
    y[0, targets[0]] = torch.inf
    y[1, (targets[1] + 1) % V] = torch.inf
    y[2, targets[2]] = torch.nan
    y[3, (targets[3] + 1) % V] = torch.nan
    y[4] = -torch.inf


@pytest.mark.parametrize("spoil", [impossible, unbounded])
@pytest.mark.parametrize(("run", "terms"), RUNS)
def test_infinities_and_nan_propagate(run: Any, spoil: Any, terms: Terms):
    y, targets = logits(2.0, 0.0)
    spoil(y, targets)
    (losses, gradients), (found, grads) = torchs(y, targets, 0.0, terms), run(y, targets, 0.0, terms)
    finite = losses.isfinite()
    assert found.isfinite().tolist() == finite.tolist()
    assert found.isnan().tolist() == losses.isnan().tolist()
    assert torch.allclose(found[finite], losses[finite], rtol=1e-5, atol=1e-6)
    assert torch.allclose(grads[finite], gradients[finite], rtol=1e-5, atol=1e-6)
    assert grads[losses.isnan()].isnan().all()


LABELS = [-1, -101, -(2**40), 50, 2**31, 2**40]
"""Neither ignored nor one of the 50 tokens of ``inputs``."""


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("loss", [linear_cross_entropy, fused_linear_cross_entropy], ids=["chunked", "fused"])
def test_an_invalid_label_makes_the_loss_nan(loss: Any, label: int):
    """PyTorch's loss raises on a CPU and asserts on a GPU."""
    hidden, weight, _, targets = inputs(torch.float32)
    assert loss(hidden, Head(weight), targets, rows=8).isfinite()
    targets[20] = label
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(hidden @ weight.t(), targets)
    found = loss(hidden, Head(weight), targets, rows=8)
    assert found.isnan()
    found.backward()
    assert weight.grad.isnan().all()
    with torch.no_grad():
        assert loss(hidden, Head(weight), targets, rows=8).isnan()


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize(
    "run", [fused.plain_cross_entropy, pytest.param(triton, marks=interpreted)], ids=["plain", "triton"]
)
def test_only_the_row_of_an_invalid_label_is_nan(run: Any, label: int):
    torch.manual_seed(0)
    y, targets = torch.randn(3, 50), torch.tensor([1, label, IGNORED])
    losses = run(y, targets, torch.tensor(1.0), 1.0, 0.0, Terms(), True)
    assert losses.isnan().tolist() == [False, True, False]
    assert y.isnan().all(1).tolist() == [False, True, False]
    assert not y[2].any()


@pytest.mark.parametrize("loss", ["chunked", "fused"])
@pytest.mark.parametrize("code", ["hf", "native"])
def test_ignored_labels_are_the_only_negative_ones_that_train(loss: Any, code: Any):
    step = assemble(tiny_recipe(code, loss=loss, batch=Batch(micro=1, seq=8)), torch.device("cpu"))
    (batch,) = step.random_batches()
    batch["labels"][0, 3:] = IGNORED
    assert step.loss(batch).isfinite()
    batch["labels"][0, 5] = -1
    assert step.loss(batch).isnan()
