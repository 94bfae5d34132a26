"""Functions of the step number: which sequences a step trains on, and its learning rate.

A resumed run therefore needs no state for either. Each epoch is a permutation of all sequences, computed
index by index in constant memory: a Feistel network over the index's bits, repeated until the result is in
range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, method 2). The learning rate's
schedules: spec/schedule.py.
"""

from typing import TYPE_CHECKING

import numpy as np

from trainfit.spec.schedule import rate_share
from trainfit.training.corpus import Corpus
from trainfit.training.options import TrainOptions

if TYPE_CHECKING:
    import torch

ROUNDS = 6
UINT = np.uint64


def learning_rate(base: float, step: int, options: TrainOptions) -> float:
    """Return the rate of ``step`` (from 0)."""
    return base * rate_share(
        options.schedule,
        step,
        steps=options.steps,
        warmup=options.warmup,
        floor=options.min_lr_share,
        decay=options.decay_steps,
        power=options.lr_power,
    )


def step_sequences(
    corpus: Corpus, seed: int, per_step: int, step: int, share: tuple[int, int] = (0, 1)
) -> "dict[str, torch.Tensor]":
    """Return the examples of ``step`` (from 0), [per_step / n, s], as ``measurement.feed.Source`` describes.

    Of pairs there are twice as many rows. They have no weights: each pair counts alike.

    Args:
        share: part i of n, that of one rank.
    """
    import torch

    part, parts = share
    every = sequence_numbers(seed, step, per_step, len(corpus))
    numbers = every.reshape(parts, -1)[part]
    found = {name: torch.from_numpy(array) for name, array in corpus.batch(numbers).items()}
    if not corpus.is_plain and not corpus.pairs:
        labels = corpus.num_labels(numbers) / corpus.num_labels(every).mean()
        found["weight"] = torch.from_numpy(labels)
    return found


def sequence_numbers(seed: int, step: int, per_step: int, count: int) -> np.ndarray:
    """Return the sequences that ``step`` (from 0) trains on, out of ``count``, as int64 [per_step]."""
    epochs, within = np.divmod(step * per_step + np.arange(per_step, dtype=np.int64), count)
    # A step that crosses the end of an epoch continues with the next epoch's permutation.
    parts = (permuted(within[epochs == epoch], count, seed, int(epoch)) for epoch in np.unique(epochs))
    return np.concatenate(list(parts))


def permuted(indices: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Map ``indices`` (int64) by the permutation of range(``count``) that belongs to (seed, epoch)."""
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    rounds = np.arange(ROUNDS, dtype=UINT)
    keys = _mix(_mix(_mix(np.full(ROUNDS, seed, dtype=UINT)) + UINT(epoch)) + rounds)
    moved = _feistel(indices.astype(UINT), half_bits, keys)
    # The network permutes a power of 4: apply it again to results that are out of range.
    while (outside := moved >= UINT(count)).any():
        moved[outside] = _feistel(moved[outside], half_bits, keys)
    return moved.astype(np.int64)


def _feistel(numbers: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    mask, shift = UINT((1 << half_bits) - 1), UINT(half_bits)
    left, right = numbers >> shift, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << shift) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser (Steele, Lea and Flood, 2014), so that every input bit counts."""
    with np.errstate(over="ignore"):
        values = values + UINT(0x9E3779B97F4A7C15)
        values = (values ^ (values >> UINT(30))) * UINT(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> UINT(27))) * UINT(0x94D049BB133111EB)
    return values ^ (values >> UINT(31))
