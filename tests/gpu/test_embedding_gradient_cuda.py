"""An embedding's gradient that is added to a kept sum, on a GPU, against fp64."""

import pytest
import torch

from trainfit.kernels.embedding import op

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="the kernel is in Triton, which needs a GPU from Ampere on",
    ),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("vocabulary", "width", "num_tokens", "drawn"),
    [(152064, 3584, 4096, 152064), (151936, 896, 65536, 40), (50257, 769, 1000, 50257)],
)
def test_sums_are_those_in_fp64_and_equal_in_two_runs(
    dtype: torch.dtype, vocabulary: int, width: int, num_tokens: int, drawn: int
) -> None:
    """Of few tokens drawn each has long runs."""
    op.register()
    torch.manual_seed(0)
    tokens = torch.randint(drawn, (4, num_tokens // 4), device="cuda")
    weight = torch.zeros(vocabulary, width, device="cuda", dtype=dtype, requires_grad=True)
    d = torch.randn(*tokens.shape, width, device="cuda", dtype=dtype)
    padding = int(tokens[0, 0])
    counts = (tokens != padding).flatten()
    found = list[torch.Tensor]()
    for _ in range(2):
        kept = torch.ones_like(weight, requires_grad=False)
        op.embedding(tokens, weight, kept, padding).backward(d)
        found.append(kept)
    assert torch.equal(*found)
    rows = tokens.flatten()[counts].unique()
    places = torch.searchsorted(rows, tokens.flatten()[counts])
    expected = torch.ones(len(rows), width, device="cuda", dtype=torch.float64)
    expected.index_add_(0, places, d.flatten(0, 1)[counts].double())
    off = (found[0][rows].double() - expected).abs()
    assert bool((off <= torch.finfo(dtype).eps / 2 * expected.abs() + 1e-2).all())
    found[0][rows] = 1
    assert bool((found[0] == 1).all())
