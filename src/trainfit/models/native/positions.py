"""Positions in attention: RoPE, ALiBi, causal and sliding-window masks.

Shapes: b batch, s sequence, h heads, d head_dim, r rotary_dim.
"""

import math

import torch
from torch import Tensor

from trainfit.models.native.config import NativeConfig, Rope


def inverse_frequencies(rope: Rope, rotary_dim: int, device: torch.device | str) -> Tensor:
    """Return the angle per position of each of the r/2 pairs, fp32 [r/2].

    ``default``: RoFormer, arXiv:2104.09864, section 3.4.2. ``linear``: divided by ``factor``
    (arXiv:2306.15595). ``llama3``: long wavelengths divided, short ones kept, a ramp between (Llama 3.1's
    reference code). ``yarn``: arXiv:2309.00071, section 3.2, "NTK-by-parts".
    """
    steps = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device)
    kept = 1.0 / (rope.rope_theta ** (steps / rotary_dim))
    if rope.rope_type == "default":
        return kept
    stretched = kept / rope.factor
    if rope.rope_type == "linear":
        return stretched
    original = rope.original_max_position_embeddings
    assert original is not None
    if rope.rope_type == "llama3":
        turns = original * kept / (2 * math.pi)
        share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    else:
        low, high = _yarn_range(rope, rotary_dim, original)
        share = 1 - (torch.arange(rotary_dim // 2, dtype=torch.float32, device=device) - low) / (high - low)
    share = share.clamp(0, 1)
    return share * kept + (1 - share) * stretched


def _yarn_range(rope: Rope, rotary_dim: int, original: int) -> tuple[float, float]:
    """Return the first and last pair of YaRN's ramp (``beta_fast`` and ``beta_slow`` turns)."""

    def pair(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    return low, high + 0.001 if low == high else high


def attention_factor(rope: Rope) -> float:
    """Return the factor of cos and sin: 1, except for YaRN (arXiv:2309.00071, equation 22)."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rotate(x_bshd: Tensor, cos_sr: Tensor, sin_sr: Tensor) -> Tensor:
    """Rotate the first r elements of each head by its position; ``cos_sr`` and ``sin_sr`` are [s, 1, r/2].

    Element i is paired with i + r/2, as in transformers' Llama.
    """
    half = cos_sr.shape[-1]
    first, second, rest = x_bshd.split([half, half, x_bshd.shape[-1] - 2 * half], dim=-1)
    rotated = (first * cos_sr - second * sin_sr, second * cos_sr + first * sin_sr)
    return torch.cat((*rotated, rest) if rest.shape[-1] else rotated, dim=-1)


def alibi_slopes(num_heads: int) -> list[float]:
    """Return ALiBi's slopes (arXiv:2108.12409, section 3), interpolated between powers of 2."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    if power < num_heads:
        slopes += alibi_slopes(2 * power)[0::2][: num_heads - power]
    return slopes


def additive_bias(
    config: NativeConfig, seq: int, slopes_h: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Return the bias of the scores, [1, h or 1, s, s]; None for plain causal attention."""
    window = min(config.sliding_window or seq, seq)
    if slopes_h is None and window == seq:
        return None
    positions = torch.arange(seq, device=device)
    distance = positions[:, None] - positions[None, :]
    masked = (distance < 0) | (distance >= window)
    bias = (
        -slopes_h.float()[:, None, None] * distance
        if slopes_h is not None
        else torch.zeros(1, 1, 1, device=device)
    )
    return bias.masked_fill(masked, float("-inf")).to(dtype)[None]


def documents_bias(
    config: NativeConfig, position_ids_bs: Tensor, slopes_h: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the bias of scores within documents, [b, h or 1, s, s].

    Args:
        position_ids_bs: positions that begin anew with each document.
    """
    b, seq = position_ids_bs.shape
    device = position_ids_bs.device
    first = position_ids_bs[:, :1] - 1
    document = (torch.diff(position_ids_bs, prepend=first, dim=-1) != 1).cumsum(-1)
    positions = torch.arange(seq, device=device)
    distance = positions[:, None] - positions[None, :]
    window = min(config.sliding_window or seq, seq)
    masked = (distance < 0) | (distance >= window) | (document[:, :, None] != document[:, None, :])
    bias = (
        -slopes_h.float()[:, None, None] * distance
        if slopes_h is not None
        else torch.zeros(1, 1, 1, device=device)
    )
    return bias.to(dtype).expand(b, -1, seq, seq).masked_fill(masked[:, None], float("-inf"))


def prefix_bias(seq: int, num_prefix: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the bias of causal attention after a prefix, [1, 1, s, num_prefix + s]."""
    bias = torch.full((seq, num_prefix + seq), float("-inf"), dtype=dtype, device=device)
    return bias.triu_(num_prefix + 1)[None, None]
