"""An embedding's gradient that is added to a kept sum: by PyTorch, and by the kernel in an interpreter."""

import pytest
import torch
from torch import Tensor

from kernel_runs import interpreted_loops
from trainfit.kernels.embedding import op

VOCABULARY, WIDTH, PADDING = 23, 300, 5  # More columns than a program's
ADDS = [
    pytest.param(op.plain_add, id="plain"),
    pytest.param(op.triton_add, id="triton", marks=interpreted_loops),
]
TOKENS = {
    "drawn": torch.randint(VOCABULARY, (77,), generator=torch.Generator().manual_seed(1)),
    "long runs": torch.tensor([3] * 40 + [PADDING] * 33 + [4] * 16 + [22] * 17),
    "one": torch.tensor([7]),
    "all equal": torch.full((50,), 22),
    "padding alone": torch.full((9,), PADDING),
    "none": torch.empty(0, dtype=torch.int64),
}


def operands(tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(VOCABULARY, WIDTH).to(dtype), torch.randn(len(tokens), WIDTH).to(dtype)


@pytest.mark.parametrize("add", ADDS)
@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("padding", [PADDING, op.NO_PADDING])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_are_those_in_fp64_rounded_once(add, name: str, padding: int, dtype: torch.dtype) -> None:
    tokens = TOKENS[name]
    kept, gradient = operands(tokens, dtype)
    before, counts = kept.clone(), tokens != padding
    expected = kept.double().index_add_(0, tokens[counts], gradient.double()[counts])
    in_order, positions = torch.sort(tokens, stable=True)
    add(kept, gradient, in_order, positions, padding)
    # Triton's interpreter cuts bf16 off instead of rounding it.
    steps = 1.0 if add is op.triton_add else 0.5
    bound = steps * torch.finfo(dtype).eps * expected.abs() + 1e-5
    assert bool(((kept.double() - expected).abs() <= bound).all())
    untouched = torch.ones(VOCABULARY, dtype=torch.bool)
    untouched[tokens[counts]] = False
    assert torch.equal(kept[untouched], before[untouched])


@pytest.mark.parametrize("add", ADDS)
def test_two_runs_are_equal(add) -> None:
    tokens = TOKENS["drawn"]
    in_order, positions = torch.sort(tokens, stable=True)
    found = list[Tensor]()
    for _ in range(2):
        kept, gradient = operands(tokens, torch.bfloat16)
        add(kept, gradient, in_order, positions, op.NO_PADDING)
        found.append(kept)
    assert torch.equal(*found)


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("shape", [(77,), (7, 11)], ids=str)
def test_an_embeddings_gradient_is_autograds(shape: tuple[int, ...], padding: int | None) -> None:
    op.register()
    torch.manual_seed(0)
    tokens, weight = TOKENS["drawn"].view(shape), torch.randn(VOCABULARY, WIDTH, dtype=torch.float64)
    weight.requires_grad_()
    d, kept = torch.randn(*shape, WIDTH, dtype=torch.float64), torch.ones_like(weight, requires_grad=False)
    out = op.embedding(tokens, weight, kept, padding)
    expected = torch.nn.functional.embedding(tokens, weight, padding)
    assert torch.equal(out, expected)
    out.backward(d)
    assert weight.grad is None
    expected.backward(d)
    assert weight.grad is not None
    torch.testing.assert_close(kept, 1 + weight.grad)


def test_a_gradient_that_is_expanded() -> None:
    op.register()
    weight, kept = torch.randn(5, 3, requires_grad=True), torch.zeros(5, 3)
    op.embedding(torch.tensor([1, 1, 4]), weight, kept).sum().backward()
    assert kept[:, 0].tolist() == [0, 2, 0, 0, 1]


def test_a_single_token_without_dimensions() -> None:
    op.register()
    weight, kept = torch.randn(5, 3, requires_grad=True), torch.zeros(5, 3)
    op.embedding(torch.tensor(4), weight, kept).sum().backward()
    assert kept[:, 0].tolist() == [0, 0, 0, 0, 1]
