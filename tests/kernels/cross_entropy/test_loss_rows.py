"""Losses and gradients of rows of logits over the range of fp32: chunked, in PyTorch and in Triton.

They are compared with PyTorch's operations, also for infinities, NaN and invalid labels.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_runs import interpreted_loops
from trainfit.kernels.cross_entropy import chunked, fused, gradients_in_forward
from trainfit.kernels.cross_entropy.chunked import Head
from trainfit.kernels.cross_entropy.terms import Terms, cross_entropy_with_terms

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


def triton(*arguments: Any) -> Tensor:
    return fused.triton_cross_entropy(*arguments, block=64)


def run_plain(
    y: Tensor, targets: Tensor, softcap: float, terms: Terms, run: Any = fused.plain_cross_entropy
) -> tuple[Tensor, Tensor]:
    """Rows lie three elements apart in memory, which stay as they are."""
    logits = torch.full((len(y), y.shape[1] + 3), 9.0, dtype=y.dtype)[:, : y.shape[1]]
    logits.copy_(y)
    factor = torch.tensor(1.0, dtype=torch.promote_types(y.dtype, torch.float32))
    losses = run(logits, targets, factor, 1.0, softcap, terms, True)
    assert (logits._base[:, y.shape[1] :] == 9.0).all()
    return losses, logits


def run_triton(y: Tensor, targets: Tensor, softcap: float, terms: Terms) -> tuple[Tensor, Tensor]:
    return run_plain(y, targets, softcap, terms, triton)


RUNS = [
    pytest.param(run_chunked, Terms(), id="chunked"),
    *(pytest.param(run_plain, terms, id=f"plain-{terms}") for terms in (Terms(), Terms(0.2, 1e-6))),
    pytest.param(run_triton, Terms(), id="triton", marks=interpreted_loops),
    pytest.param(run_triton, Terms(0.2, 1e-6), id="triton with terms", marks=interpreted_loops),
]


def definition(x: Tensor, targets: Tensor, terms: Terms) -> Tensor:
    """Compute ``cross_entropy_with_terms`` without logsumexp, whose gradient has its own rounding error."""
    loss = F.cross_entropy(x, targets, label_smoothing=terms.label_smoothing)
    highest = x.detach().amax(1, keepdim=True)
    lse = highest + (x - highest).exp().sum(1, keepdim=True).log()
    return loss + terms.z_loss * lse.square().mean() if terms.z_loss else loss


def by_pytorch(
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


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("offset", [0.0, 1.0, -1.0], ids=["around 0", "high", "low"])
@pytest.mark.parametrize(("run", "terms"), RUNS)
def test_losses_and_gradients_of_huge_logits(run: Any, offset: float, softcap: float, terms: Terms):
    """As close to fp64 as PyTorch's fp32 is, for every power of ten that fp32 and the squared terms hold."""
    powers = (0, 10) if run is run_triton else (0, 2, 4, 5, 6, 8, 10, 15)  # The interpreter is slow.
    for power in (*powers, 18 if terms.z_loss and not softcap else 30):
        size = 10.0**power
        for spread in {1.0, size}:
            y, targets = logits(spread, offset * size)
            exact = by_pytorch(y.double(), targets, softcap, terms, loss_of=definition)
            usual = by_pytorch(y, targets, softcap, terms)
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
    (losses, gradients), (found, grads) = by_pytorch(y, targets, 0.0, terms), run(y, targets, 0.0, terms)
    finite = losses.isfinite()
    assert found.isfinite().tolist() == finite.tolist()
    assert found.isnan().tolist() == losses.isnan().tolist()
    assert torch.allclose(found[finite], losses[finite], rtol=1e-5, atol=1e-6)
    assert torch.allclose(grads[finite], gradients[finite], rtol=1e-5, atol=1e-6)
    assert grads[losses.isnan()].isnan().all()


@pytest.mark.parametrize("run", [run_plain, pytest.param(run_triton, marks=interpreted_loops)])
def test_only_rows_of_invalid_labels_are_nan(run: Any):
    torch.manual_seed(0)
    targets = torch.tensor([1, -1, -101, -(2**40), 50, 2**31, 2**40, IGNORED])
    losses, gradients = run(torch.randn(8, 50), targets, 0.0, Terms())
    assert losses.isnan().tolist() == gradients.isnan().all(1).tolist() == [False] + 6 * [True] + [False]
    assert not gradients[-1].any()


@interpreted_loops
@pytest.mark.parametrize("terms", [Terms(), Terms(0.1), Terms(z_loss=1e-2), Terms(0.2, 1e-2, 7)], ids=str)
@pytest.mark.parametrize(("dtype", "softcap"), [(torch.float32, 3.0), (torch.float16, 0.0)])
def test_the_kernel_in_the_interpreter(dtype: torch.dtype, softcap: float, terms: Terms):
    for c, v in ((1, 1), (5, 64), (3, 131), (4, 257)):
        torch.manual_seed(v)
        y, targets = (2 * torch.randn(c, v)).to(dtype), torch.randint(v, (c,))
        targets[c // 2] = terms.ignore_index
        found, exact = run_triton(y, targets, softcap, terms), run_plain(y.double(), targets, softcap, terms)
        assert torch.allclose(found[0].double(), exact[0], rtol=2e-6, atol=1e-5)
        relative = 1e-3 if dtype == torch.float16 else 1e-5
        assert torch.allclose(found[1].double(), exact[1], rtol=relative, atol=2e-7)


@pytest.mark.parametrize("run", [fused.plain_cross_entropy, pytest.param(triton, marks=interpreted_loops)])
def test_each_row_has_a_factor_of_its_own(run: Any):
    torch.manual_seed(0)
    y, targets, factors = torch.randn(5, 131), torch.randint(131, (5,)), torch.randn(10)[::2]
    _, gradients = run_plain(y, targets, 0.0, Terms())
    logits = y.clone()
    run(logits, targets, factors, 1.0, 0.0, Terms(), True)
    assert torch.allclose(logits, gradients * factors[:, None], rtol=1e-5, atol=1e-7)


@interpreted_loops
def test_certain_tokens_in_fp16():
    """One token has all the probability: as the target, and against it; another is impossible."""
    y, targets = logits(4.0, 0.0)
    y = y.half()
    y[0, 3], y[1, 3], y[2, 5] = 6e4, 6e4, -torch.inf
    targets[0], targets[1] = 3, 4
    got, exact = run_triton(y, targets, 0.0, Terms()), run_plain(y.double(), targets, 0.0, Terms())
    assert got[1].isfinite().all()
    assert torch.allclose(got[0].double(), exact[0], rtol=1e-5)
    assert torch.allclose(got[1].double(), exact[1], rtol=1e-3, atol=1e-7)
    assert got[0][0] == 0
    assert got[0][1] == pytest.approx(6e4, rel=1e-3)


@interpreted_loops
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_are_scaled_unless_the_factor_is_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """More elements than all programs take at once, and no multiple of a block."""
    monkeypatch.setattr(gradients_in_forward, "PROGRAMS", 2)
    monkeypatch.setattr(gradients_in_forward, "BLOCK", 16)
    for numel in (1, 16, 100):
        x = torch.randn(numel).to(dtype)
        before = x.clone()
        gradients_in_forward.triton_multiply_unless_one(x, torch.tensor(1.0))
        assert torch.equal(x, before)
        gradients_in_forward.triton_multiply_unless_one(x, torch.tensor(0.3))
        assert torch.equal(x, before * torch.tensor(0.3))
