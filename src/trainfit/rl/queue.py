"""A rollout's completions as tensors, from which updates take their micro-batches.

Shapes: n completions of the whole rollout, m of this rank, s positions of the longest.

Which completion is trained when depends on its number alone (shares.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainfit.rl.objectives.policy import token_weights
from trainfit.rl.rollout.generate import Completion
from trainfit.rl.shares import Share, positions
from trainfit.spec.errors import InputError
from trainfit.spec.objective import Policy
from trainfit.step import Batch

SHARED = ("prompts", "lengths", "rewards", "advantages")
"""What every rank has of all completions, [n]."""
OWN = ("input_ids", "old", "reference")
"""What a rank has of its completions, [m, s]."""


@dataclass
class Queue:
    """Completions of one rollout, on the host.

    Attributes:
        rollout: its number, from 0.
        prompts, lengths: int64 [n], tokens of each prompt and completion; rewards, advantages: fp32 [n].
        input_ids: int64 [m, s], prompts and completions, padded at the end.
        old, reference: fp32 [m, s], log-probabilities of each position's next token.
    """

    rollout: int
    share: Share
    prompts: Tensor
    lengths: Tensor
    rewards: Tensor
    advantages: Tensor
    input_ids: Tensor
    old: Tensor
    reference: Tensor

    @classmethod
    def of(
        cls,
        rollout: int,
        share: Share,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Completion],
        rewards: Tensor,
        advantages: Tensor,
    ) -> Queue:
        """Return the queue of a whole rollout's prompts and completions, not scored yet."""
        whole = [[*prompt, *one.tokens] for prompt, one in zip(prompts, completions, strict=True)]
        longest = max(map(len, whole))
        rows = [whole[number] for number in share.every()]
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        blank = torch.zeros(ids.shape, dtype=torch.float32)
        return cls(
            rollout, share, torch.tensor([len(prompt) for prompt in prompts]),
            torch.tensor([len(one.tokens) for one in completions]), rewards, advantages, ids, blank,
            blank.clone(),
        )  # fmt: skip

    def counted(self, numbers: Sequence[int]) -> Tensor:
        """Return the positions whose next token is a completion's, bool [len(numbers), s]."""
        at = torch.arange(self.input_ids.shape[1])
        first = self.prompts[list(numbers), None] - 1
        return (at >= first) & (at < first + self.lengths[list(numbers), None])

    def micro_batches(self, update: int) -> list[slice]:
        """Return the rows of each micro-batch of an update."""
        return self.share.micro_batches(update)

    def positions(self, rows: slice, most: int, whole: bool) -> int:
        """Return how many positions a micro-batch has; ``most``, ``whole``: as ``shares.positions``."""
        numbers = self.share.every()[rows]
        return positions(int((self.prompts + self.lengths)[numbers].max()), most, whole)

    def ids(self, rows: slice, positions: int) -> Tensor:
        """Return a micro-batch's token ids, padded or cut to so many positions, int64 [b, positions]."""
        return _resized(self.input_ids[rows], positions)

    def batches(self, policy: Policy, update: int, most: int, accumulate: int, whole: bool) -> list[Batch]:
        """Return an update's micro-batches on the host.

        Weights sum to 1 over the update, times the micro-batches and ranks whose losses the step averages.
        """
        share, updates = self.share, self.share.completions // self.share.updates
        everyone = range(update * updates, (update + 1) * updates)
        weights = token_weights(self.counted(everyone), policy.per) * (accumulate * share.ranks)
        mine = share.numbers(update)
        weights = weights[mine.start - everyone.start : mine.stop - everyone.start]
        found: list[Batch] = []
        first = update * share.of_update
        for rows in self.micro_batches(update):
            positions = self.positions(rows, most, whole)
            here = slice(rows.start - first, rows.stop - first)
            advantages = self.advantages[share.every()[rows]]
            ids = self.ids(rows, positions)
            found.append({
                "input_ids": ids,
                "labels": ids,
                "old": _resized(self.old[rows], positions),
                "reference": _resized(self.reference[rows], positions),
                "advantages": advantages[:, None].expand(-1, positions).contiguous(),
                "weights": _resized(weights[here], positions),
            })  # fmt: skip
        return found

    def tensors(self, of_ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the queue of all ranks in the order of the completions' numbers, as a checkpoint keeps it.

        Args:
            of_ranks: ``own()`` of each rank.
        """
        share = self.share
        order = torch.tensor([
            number for rank in range(share.ranks) for number in Share(**vars(share) | {"rank": rank}).every()
        ])  # fmt: skip
        found = {name: getattr(self, name) for name in SHARED}
        for name in OWN:
            stacked = torch.cat([one[name] for one in of_ranks])
            found[name] = torch.empty_like(stacked).index_copy_(0, order, stacked)
        return found

    def own(self) -> dict[str, Tensor]:
        """Return what only this rank has."""
        return {name: getattr(self, name) for name in OWN}

    @classmethod
    def restored(
        cls, rollout: int, share: Share, saved: Mapping[str, Tensor], policy: Policy, vocabulary: int
    ) -> Queue:
        """Return a checkpoint's queue.

        Raises:
            InputError: tensors of another run, or that none can have.
        """
        _check(saved, share.completions, policy, vocabulary)
        rows = share.every()
        shared = {name: saved[name] for name in SHARED}
        return cls(rollout, share, **shared, **{name: saved[name][rows] for name in OWN})


def _resized(x: Tensor, positions: int) -> Tensor:
    """Return [b, positions] of [b, s]: padded by 0, or without positions that are padding."""
    return torch.nn.functional.pad(x, (0, positions - x.shape[1]))


def _check(saved: Mapping[str, Tensor], n: int, policy: Policy, vocabulary: int) -> None:
    def require(fits: bool, name: str, problem: str) -> None:
        if not fits:
            remedy = "resume from an older checkpoint, or with the recipe it was saved with"
            raise InputError(f"the checkpoint's queue is not this run's: {problem}", remedy, field=name)

    different = sorted({*SHARED, *OWN} ^ set(saved))
    require(not different, "queue", f"{different[0]} is in only one of both" if different else "")
    found = {name: saved[name] for name in (*SHARED, *OWN)}
    s = found["input_ids"].shape[-1]
    for name, tensor in found.items():
        whole = name in ("prompts", "lengths", "input_ids")
        shape, dtype = ((n, s) if name in OWN else (n,)), torch.int64 if whole else torch.float32
        is_form = tuple(tensor.shape) == shape and tensor.dtype == dtype
        require(is_form, name, f"{tensor.dtype} {tuple(tensor.shape)}")
        require(whole or bool(torch.isfinite(tensor).all()), name, "not finite numbers")
    ids, prompts, lengths = (found[name] for name in ("input_ids", "prompts", "lengths"))
    require(bool(((ids >= 0) & (ids < vocabulary)).all()), "input_ids", "outside of the vocabulary")
    require(bool(((prompts > 0) & (prompts <= policy.max_prompt)).all()), "prompts", "not its lengths")
    is_length = (lengths > 0) & (lengths <= policy.max_new) & (prompts + lengths <= s)
    require(bool(is_length.all()), "lengths", "not its lengths")
