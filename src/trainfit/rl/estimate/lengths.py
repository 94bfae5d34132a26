"""Lengths of completions, and what scoring and update compute of them. No torch here.

Training pads each micro-batch to its longest row (``shares.positions``), so a rollout of short completions
computes less than sequences of ``batch.seq``, and more than the tokens it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from trainfit.ledger.ledger import Ledger, Op
from trainfit.rl.rollout.schedule import Schedule, of_mean, padded, schedule
from trainfit.rl.shares import Share, positions
from trainfit.spec.objective import Policy
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import LoopTime

EXPECTED_SHARE = 0.5
"""Of ``max_new``: the mean length that is assumed where none is given."""
OF_WEIGHTS = ("fsdp.", "trainfit.dequantize")
"""Operations that have weights alone as inputs, by the beginning of their names."""


class Lengths(NamedTuple):
    """Tokens of each prompt and each completion of a rollout, by the completions' numbers."""

    prompts: Sequence[int]
    completions: Sequence[int]


class Recorded(NamedTuple):
    """Lengths of rollouts: a run's, or assumed ones.

    Attributes:
        words: for people.
        measured: the mean loop with these lengths; None: not of a run, or without its log.
    """

    words: str
    rollouts: tuple[Lengths, ...]
    measured: LoopTime | None = None


def of_mean_new(recipe: Recipe, mean_new: float | None = None) -> Recorded:
    """Return a rollout's lengths with this mean, after the longest prompts; None: half of ``max_new``."""
    policy = recipe.objective
    assert isinstance(policy, Policy)
    mean = policy.max_new * EXPECTED_SHARE if mean_new is None else mean_new
    how = "given" if mean_new is not None else "assumed"
    lengths = of_mean(mean, policy.max_new, policy.completions)
    words = f"{mean:,.4g} tokens on average ({how}), each token as likely to be the last"
    return Recorded(words, (Lengths([policy.max_prompt] * policy.completions, lengths),))


class Filled(NamedTuple):
    """Sequences of a call as shares of those that were traced.

    Attributes:
        computed, computed_squares: mean of the computed positions, and of their squares.
        needed, needed_squares: likewise without padding.
    """

    computed: float = 1.0
    computed_squares: float = 1.0
    needed: float = 1.0
    needed_squares: float = 1.0


WHOLE = Filled()


def of_micro_batches(recipe: Recipe, rollouts: Sequence[Lengths]) -> Filled:
    """Return how much of ``batch.seq`` the micro-batches of these rollouts fill.

    Ranks wait for one another, so a micro-batch is as long as the longest of all ranks.
    """
    policy, batch, ranks = recipe.objective, recipe.batch, recipe.mesh.data_ranks
    assert isinstance(policy, Policy)
    computed, needed = list[float](), list[float]()
    for one in rollouts:
        whole = [prompt + new for prompt, new in zip(one.prompts, one.completions, strict=True)]
        shares = [
            Share(len(whole), policy.updates_per_rollout, ranks, rank, batch.micro) for rank in range(ranks)
        ]
        for update in range(policy.updates_per_rollout):
            for rows in shares[0].micro_batches(update):
                numbers = [number for share in shares for number in share.every()[rows]]
                longest = max(whole[number] for number in numbers)
                computed.append(positions(longest, batch.seq, bool(recipe.compile)) / batch.seq)
                needed += [whole[number] / batch.seq for number in numbers]
    return _filled(computed, needed)


def of_prompts(policy: Policy, rollouts: Sequence[Lengths], calls: Sequence[Schedule]) -> Filled:
    """Return how much of ``max_prompt`` the calls fill that read the prompts of these rollouts."""
    width = padded(policy.max_prompt)
    computed = [
        padded(longest) / width
        for one in calls
        for count, longest in zip(one.prefills, one.widths, strict=True)
        for _ in range(count)
    ]
    return _filled(computed, [prompt / policy.max_prompt for one in rollouts for prompt in one.prompts])


def _filled(computed: Sequence[float], needed: Sequence[float]) -> Filled:
    return Filled(
        fmean(computed),
        fmean(share * share for share in computed),
        fmean(needed),
        fmean(share * share for share in needed),
    )


def of_slowest_rank(recipe: Recipe, one: Lengths, slots: int) -> Schedule:
    """Return the schedule of the rank that appends tokens most often; ranks generate equal parts in order."""
    policy, ranks = recipe.objective, recipe.mesh.data_ranks
    assert isinstance(policy, Policy)
    each = -(-len(one.completions) // ranks)
    parts = [slice(first, first + each) for first in range(0, len(one.completions), each)]
    found = [schedule(slots, one.prompts[part], one.completions[part], policy.max_new) for part in parts]
    return max(found, key=lambda calls: calls.steps)


def shortened(ledger: Ledger, tokens: int, share: float, squares: float) -> list[Op]:
    """Return the ledger's operations with the steady step's sequences shortened.

    Products and elementwise operations are in proportion to the positions, attention's FLOPs to their
    squares; the optimizer and operations on weights alone stay as they are.

    Args:
        tokens: of a micro-batch as traced.
        share: mean of the positions over those traced; squares: of their squares.
    """
    if share == squares == 1:
        return ledger.ops
    inside = [one.step == "steady" and one.phase not in ("optimizer", "data") for one in ledger.segments]
    return [_shorter(op, tokens, share, squares) if inside[op.segment] else op for op in ledger.ops]


def _shorter(op: Op, tokens: int, share: float, squares: float) -> Op:
    if op.is_update or op.name.startswith(OF_WEIGHTS):
        return op
    more = squares if op.kernel else share
    shape, moved = op.shape, share
    if op.shape and op.shape[1:].count(tokens) == 1:
        shape = tuple(max(1, round(share * length)) if length == tokens else length for length in op.shape)
        moved = _elements(shape) / _elements(op.shape)
    return op._replace(
        flops=more * op.flops,
        causal_flops=more * op.causal_flops,
        model_flops=more * op.model_flops,
        model_flops_full=more * op.model_flops_full,
        num_bytes=round(moved * op.num_bytes),
        seq=max(1, round(share * op.seq)) if op.seq > 1 else op.seq,
        shape=shape,
    )


def _elements(shape: Sequence[int]) -> int:
    """Return the elements of a product's operands and its result."""
    batch, m, n, k = shape
    return batch * (m * k + k * n + m * n)
