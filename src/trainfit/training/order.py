"""The order of training sequences: a pure function of (seed, step), so that a resumed run needs no state for it.

Each epoch is a permutation of all sequences. It is computed number by number (a Feistel network over the index's bits,
walked until it lands inside the range: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, method 2), so
a billion sequences cost no memory.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trainfit.training.corpus import Corpus

if TYPE_CHECKING:
    import torch

ROUNDS = 6
UINT = np.uint64


@dataclass(frozen=True)
class StepSequences:
    """Which sequences each step trains on, read: a source of the loader (measurement/feed.py)."""

    corpus: Corpus
    seed: int
    per_step: int

    def __call__(self, step: int) -> "torch.Tensor":
        """Those of the step with this number (from 0), int64 [per_step, s]."""
        import torch

        numbers = sequence_numbers(self.seed, step, self.per_step, len(self.corpus))
        return torch.from_numpy(self.corpus.sequences(numbers))


def sequence_numbers(seed: int, step: int, per_step: int, count: int) -> np.ndarray:
    """Which sequences step ``step`` (from 0) trains on, int64 [per_step], out of ``count``.

    A step that crosses an epoch's end takes the rest from the next epoch's permutation.
    """
    places = step * per_step + np.arange(per_step, dtype=np.int64)
    epochs, within = places // count, places % count
    numbers = np.empty(per_step, dtype=np.int64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        numbers[chosen] = permuted(within[chosen], count, seed, int(epoch))
    return numbers


def permuted(indices: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Where a permutation of range(``count``), one for each (seed, epoch), takes ``indices`` (int64)."""
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    moved = _feistel(indices.astype(UINT), half_bits, keys)
    # The network permutes a power of 4; a number outside is sent on until it comes back inside.
    while (outside := moved >= UINT(count)).any():
        moved[outside] = _feistel(moved[outside], half_bits, keys)
    return moved.astype(np.int64)


def _feistel(numbers: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    mask, shift = UINT((1 << half_bits) - 1), UINT(half_bits)
    left, right = numbers >> shift, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << shift) | right


def _keys(seed: int, epoch: int) -> np.ndarray:
    rounds = np.arange(ROUNDS, dtype=UINT)
    return _mix(_mix(_mix(np.full(ROUNDS, seed, dtype=UINT)) + UINT(epoch)) + rounds)


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        values = values + UINT(0x9E3779B97F4A7C15)
        values = (values ^ (values >> UINT(30))) * UINT(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> UINT(27))) * UINT(0x94D049BB133111EB)
    return values ^ (values >> UINT(31))
