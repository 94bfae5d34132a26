"""Between the loop and a policy: what a session needs of the room that generates what it trains on."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from trainfit.spec.recipe import Recipe
from trainfit.step import Batch, Step
from trainfit.training.observer import EvalMetrics, RolloutMetrics
from trainfit.training.options import TrainOptions
from trainfit.training.ranks.exchange import Ranks

REWARDS = "rewards"
"""Name of the digest of the file that gives the rewards, among the facts on which a run depends."""

GENERATION = "rollout"
"""Phase in which a rank may give up before the others: after it they meet, before anything else is shared."""
Pause = Callable[[str, bool], None]
"""(name of the phase, every rank is here) -> nothing; raises ``Stopped`` if a signal ends the run here."""


class BatchFeed(Protocol):
    """An iterator over the micro-batches of one step after another."""

    reads_ahead: bool
    """Whether the next step's can be read while the device works on this one's."""

    def __iter__(self) -> Iterator[list[Batch]]: ...
    def __next__(self) -> list[Batch]: ...
    def __enter__(self) -> "BatchFeed": ...
    def __exit__(self, *_: object) -> None: ...
    def wait_s(self) -> float:
        """Return the seconds that the device waited for the newest batches."""
        ...


class Rollouts(Protocol):
    """Completions of a policy's own model, from rollout to rollout."""

    title: str
    """What the completions answer, for people."""
    tokenizer_tokens: int
    notes: tuple[str, ...]
    identity: dict[str, str]
    """Facts outside the recipe on which rewards depend."""

    def feed(
        self, steps: range, pause: Pause, on_rollout: Callable[[RolloutMetrics], None]
    ) -> AbstractContextManager[BatchFeed]:
        """Return the micro-batches of these steps, for which it generates when it is asked."""
        ...

    def evaluation(self, step: int, count: int, pause: Pause) -> EvalMetrics:
        """Return the mean reward of ``count`` held-out prompts. Raises ``Stopped`` as ``pause`` does."""
        ...

    def num_tokens(self) -> int:
        """Return the tokens of the newest update on all ranks, without padding."""
        ...

    def is_full(self) -> bool:
        """Return whether the newest update's sequences are all as long as the recipe's, without padding."""
        ...

    def readings(self) -> dict[str, float]:
        """Return fields of StepMetrics that describe the newest update; it waits for the device."""
        ...

    def queue(self) -> dict[str, Tensor]:
        """Return completions that later steps train on, of all ranks; a collective."""
        ...

    def restore(self, step: int, queue: Mapping[str, Tensor]) -> None:
        """Continue after ``step`` steps with a checkpoint's queue, whose values are checked."""
        ...

    def close(self) -> None:
        """End worker processes."""
        ...


MakeRollouts = Callable[[Recipe, TrainOptions, Step, Ranks], Rollouts]
