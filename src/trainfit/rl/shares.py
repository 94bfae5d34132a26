"""How a rollout's completions are divided into updates, ranks and micro-batches. No torch here.

Which completion is trained when depends on its number alone: update u of U takes the numbers from u n / U on,
and of these each rank takes its share in order. Example: 8 completions, 2 updates, 2 ranks::

    update   0        1
    rank 0   0 1      4 5
    rank 1   2 3      6 7
"""

from __future__ import annotations

from dataclasses import dataclass

from trainfit.rl.rollout.schedule import padded
from trainfit.spec.errors import InputError
from trainfit.spec.objective import Policy
from trainfit.spec.recipe import Recipe


@dataclass(frozen=True)
class Share:
    """How a rollout is divided.

    Attributes:
        updates: updates of a rollout; ranks: that share an update; rank: this one.
        micro: completions of a micro-batch.
    """

    completions: int
    updates: int
    ranks: int
    rank: int
    micro: int

    @property
    def of_update(self) -> int:
        """Completions of an update on this rank."""
        return self.completions // self.updates // self.ranks

    def numbers(self, update: int) -> range:
        """Return the numbers of this rank's completions in an update."""
        first = update * (self.completions // self.updates) + self.rank * self.of_update
        return range(first, first + self.of_update)

    def every(self) -> list[int]:
        """Return the numbers of this rank's completions, in the order of the updates."""
        return [number for update in range(self.updates) for number in self.numbers(update)]

    def micro_batches(self, update: int) -> list[slice]:
        """Return the positions in ``every()`` of each micro-batch of an update."""
        first, size = update * self.of_update, self.of_update
        return [slice(row, row + self.micro) for row in range(first, first + size, self.micro)]


def positions(longest: int, most: int, whole: bool) -> int:
    """Return how many positions a micro-batch has: those of its longest row, padded.

    Args:
        longest: tokens of the longest prompt with its completion.
        most: the recipe's ``batch.seq``.
        whole: always as many as the recipe's, because shapes are compiled.
    """
    return most if whole else min(padded(longest), most)


def check_counts(recipe: Recipe) -> None:
    """Refuse a policy's recipe whose micro-batches do not sum to the completions of an update.

    Raises:
        InputError: it names a ``batch.accumulate`` or ``batch.micro`` with which they do.
    """
    policy, batch, ranks = recipe.objective, recipe.batch, recipe.mesh.data_ranks
    assert isinstance(policy, Policy)
    an_update = policy.completions // policy.updates_per_rollout
    had = batch.micro * batch.accumulate * ranks
    if had == an_update:
        return
    on = f" x {ranks} GPUs" if ranks > 1 else ""
    problem = f"an update has {an_update} completions, and micro x accumulate{on} is {had} sequences"
    accumulate, rest = divmod(an_update, batch.micro * ranks)
    micro, more = divmod(an_update, batch.accumulate * ranks)
    remedy = "use a batch.micro that divides them"
    if not rest:
        remedy = f"write batch.accumulate: {accumulate}"
    elif not more:
        remedy = f"write batch.micro: {micro}"
    raise InputError(problem, remedy, field="batch.accumulate", value=batch.accumulate)
