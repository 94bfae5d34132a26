"""Sampling by noise that is a function of seed, sequence, position and token."""

import pytest
import torch

from trainfit.kernels.custom_op import interprets_triton
from trainfit.kernels.sampling import op
from trainfit.kernels.sampling.op import least_kept, row_keys, sample_tokens

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def keys_of(b: int, seed: int = 0, position: int = 0, device: str = "cpu") -> torch.Tensor:
    return row_keys(seed, torch.arange(b, device=device), torch.full((b,), position, device=device))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_frequencies_are_the_probabilities(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -20.0])
    expected = (logits / temperature).softmax(0)
    count = 40_000
    tokens, logs = sample_tokens(logits.expand(count, -1), keys_of(count, seed=5), temperature=temperature)
    found = torch.bincount(tokens, minlength=5) / count
    # Four standard deviations of the likeliest.
    assert (found - expected).abs().max() < 4 * 0.5 / count**0.5
    torch.testing.assert_close(logs, expected.log()[tokens], atol=1e-6, rtol=1e-6)


def test_a_sequence_does_not_depend_on_the_others() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    keys = row_keys(3, torch.tensor([4, 9, 2, 4, 9, 2]), torch.tensor([7, 7, 7, 8, 8, 8]))
    whole, _ = sample_tokens(logits, keys)
    for row in range(6):
        alone, _ = sample_tokens(logits[row : row + 1], keys[row : row + 1])
        assert alone.item() == whole[row].item()
    assert len({tuple(key.tolist()) for key in keys}) == 6


def test_keys_are_those_of_splitmix64() -> None:
    """Written with Python's integers; a change would make old runs another."""

    def mixed(x: int) -> int:
        x = (x + op.STEP) % 2**64
        x = (x ^ (x >> 30)) * op.FIRST % 2**64
        x = (x ^ (x >> 27)) * op.SECOND % 2**64
        return x ^ (x >> 31)

    found = row_keys(7, torch.tensor([0, 123456789]), torch.tensor([0, 5]))
    for row, (number, position) in enumerate(((0, 0), (123456789, 5))):
        whole = mixed((mixed((number + 7 * op.STEP) % 2**64) + position) % 2**64)
        assert found[row].tolist() == [whole % 2**32, whole >> 32]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("top_p", [None, 0.6])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_kernel_samples_as_the_reference(temperature: float, top_p: float | None, device: str) -> None:
    if device == "cpu" and not interprets_triton():
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    if top_p and not temperature:
        pytest.skip("greedy takes the largest")
    logits = torch.randn(9, 5000, generator=torch.Generator().manual_seed(1)).to(device).bfloat16()
    least = least_kept(logits, temperature, top_p) if top_p else None
    given = (
        logits,
        keys_of(9, 11, 2, device),
        1 / temperature if temperature else 1.0,
        temperature > 0,
        least,
    )
    tokens, logs = op.triton_sample(*given)
    expected, expected_logs = op.reference(*given)
    assert tokens.tolist() == expected.tolist()
    torch.testing.assert_close(logs, expected_logs, atol=2e-5, rtol=1e-5)


def test_the_nucleus_is_the_fewest_likeliest() -> None:
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04], [0.96, 0.01, 0.01, 0.01, 0.01]])
    logits = probabilities.log()
    for top_p, kept in ((0.65, [2, 1]), (0.75, [3, 1]), (0.95, [4, 1]), (0.3, [1, 1])):
        least = least_kept(logits, 1.0, top_p)
        assert (logits >= least[:, None]).sum(1).tolist() == kept
    tokens, _ = sample_tokens(
        logits[:1].expand(2000, -1), keys_of(2000), least=least_kept(logits[:1], 1.0, 0.65).expand(2000)
    )
    assert set(tokens.tolist()) == {0, 1}


def test_noise_is_finite() -> None:
    """The largest of 23 bits is below 1 in fp32."""
    largest = torch.tensor((2**23 - 1) + 0.5) * 2.0**-23
    assert largest < 1
    assert torch.isfinite(-(-largest.log()).log())


@pytest.mark.parametrize("device", DEVICES)
def test_a_nucleus_of_one_token_is_that_token(device: str) -> None:
    """Large logits, whose sum with the softmax's logarithm rounds by more than the threshold leaves."""
    if device == "cpu" and not interprets_triton():
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    b, temperature = 200, 0.7
    generator = torch.Generator().manual_seed(2)
    logits = 40 + torch.randn(b, 300, generator=generator)
    likeliest = torch.randint(300, (b,), generator=generator)
    logits[torch.arange(b), likeliest] += 12
    logits = logits.to(device)
    least = least_kept(logits, temperature, 0.5)
    for run in (op.triton_sample, op.reference):
        tokens, logs = run(logits, keys_of(b, device=device), 1 / temperature, True, least)
        assert tokens.tolist() == likeliest.tolist()
        assert logs.cpu().abs().max() < 0.1
