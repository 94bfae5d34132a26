"""Sample a token of each row of logits, and its log-probability, in one pass.

Shapes: logits [b, v]. The sample is the token with the largest ``logits / temperature + Gumbel noise`` (the
Gumbel-max trick), which is distributed as softmax(logits / temperature). The noise of a token is a function
of the seed, the sequence's number, the position and the token alone: so a sequence does not depend on which
others are generated with it, on the device or on a restart, and no generator has a state to save. Noise has
23 bits: a token whose probability is below 2^-23 is sampled less exactly.

Memory: the results; ``reference`` also holds several [b, v] in fp32 and int64.
"""

from functools import cache

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare, triton_kernels

LOW32 = (1 << 32) - 1
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64's constants (Steele et al., 2014)."""
MIX1, MIX2 = 0x85EBCA6B, 0xC2B2AE35
"""MurmurHash3's 32-bit finalizer."""
BLOCK = 4096


def sample_tokens(
    logits: Tensor,
    keys: Tensor,
    *,
    temperature: float = 1.0,
    least: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return sampled tokens, int64 [b], and their log-probabilities at this temperature, fp32 [b].

    Registers the operator on first use.

    Args:
        keys: int64 [b, 2], of ``row_keys``.
        temperature: 0 takes the largest logit; its log-probability is that at temperature 1.
        least: fp32 [b]; tokens with a smaller log-probability are not sampled. None: none is left out.
    """
    register()
    noise = temperature > 0
    return torch.ops.trainfit.sample_tokens(logits, keys, 1 / temperature if noise else 1.0, noise, least)


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.sample_tokens``."""
    declare("sample_tokens", reference, _fake, triton=triton_sample)


def row_keys(seed: int, numbers: Tensor, positions: Tensor) -> Tensor:
    """Return two 32-bit keys of each sequence at a position, int64 [b, 2].

    Args:
        numbers, positions: int64 [b].
    """
    mixed = _mixed64(_mixed64(numbers + _signed(seed * STEP)) + positions)
    return torch.stack((mixed & LOW32, _shifted(mixed, 32)), dim=1)


def _mixed64(x: Tensor) -> Tensor:
    """Return SplitMix64's next output for each state."""
    x = x + _signed(STEP)
    x = (x ^ _shifted(x, 30)) * _signed(FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(SECOND)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """Return the int64 with the same bits."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


def least_kept(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return the log-probability from which tokens are kept, fp32 [b]: nucleus sampling (arXiv:1904.09751).

    The kept tokens are the fewest of the largest probabilities that sum to ``top_p``, and those as likely as
    the last of them. By bisection, because a cumulative sum on a GPU is not reproducible.
    """
    probabilities = (logits.float() / temperature).softmax(dim=-1)
    low = torch.zeros_like(probabilities[:, 0])
    high = probabilities.amax(dim=-1)
    for _ in range(40):
        middle = (low + high) / 2
        mass = torch.where(probabilities >= middle[:, None], probabilities, 0).sum(dim=-1)
        enough = mass >= top_p
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    # The smallest kept probability, a little less: rounding of its logarithm must not lose it.
    kept = torch.where(probabilities >= low[:, None], probabilities, 2.0).amin(dim=-1)
    return kept.log() - 1e-6


def reference(
    logits: Tensor, keys: Tensor, scale: float, noise: bool, least: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute noise and log-probabilities of all tokens."""
    logs = (logits.float() * scale).log_softmax(dim=-1)
    scores = logs
    if noise:
        scores = logs - (-_uniforms(keys, logits.shape[1]).log()).log()
    if least is not None:
        # The likeliest is kept, whatever the rounding of the smallest.
        kept = (logs >= least[:, None]) | (logs == logs.amax(dim=-1, keepdim=True))
        scores = scores.masked_fill(~kept, float("-inf"))
    tokens = scores.argmax(dim=-1)
    return tokens, logs.gather(1, tokens[:, None])[:, 0]


def _uniforms(keys: Tensor, v: int) -> Tensor:
    """Return numbers in (0, 1) of each row and token, fp32 [b, v], none of which rounds to 1."""
    tokens = torch.arange(v, device=keys.device)
    mixed = _mixed32(_mixed32((tokens + keys[:, :1]) & LOW32) ^ keys[:, 1:])
    return ((mixed >> 9).float() + 0.5) * 2.0**-23


def _mixed32(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * MIX1) & LOW32
    x = ((x ^ (x >> 13)) * MIX2) & LOW32
    return x ^ (x >> 16)


def triton_sample(
    logits: Tensor, keys: Tensor, scale: float, noise: bool, least: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute ``reference`` in one kernel; with ``least`` in two passes over the logits."""
    tokens, logs = _fake(logits, keys, scale, noise, least)
    keys, least = keys.contiguous(), None if least is None else least.contiguous()
    if logits.shape[0]:
        triton_kernels("kernels.sampling.triton").sample_kernel[(logits.shape[0],)](
            logits, keys, logits if least is None else least, tokens, logs, logits.shape[1], scale,
            *logits.stride(), NOISE=noise, HAS_LEAST=least is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return tokens, logs


def _fake(
    logits: Tensor, keys: Tensor, scale: float, noise: bool, least: Tensor | None
) -> tuple[Tensor, Tensor]:
    b = logits.shape[0]
    return (
        torch.empty(b, dtype=torch.int64, device=logits.device),
        torch.empty(b, dtype=torch.float32, device=logits.device),
    )
