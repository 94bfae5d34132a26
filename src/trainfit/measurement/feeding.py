"""Batches of measured steps: one that stays on the device, or random tokens through the recipe's loader."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainfit.step import Batch, Step, vocabulary
from trainfit.techniques import loader


@contextmanager
def feeding(step: Step, num_steps: int) -> Iterator[Callable[[], list[Batch]]]:
    """A function that gives each of at most ``num_steps`` steps its micro-batches.

    With the loader's defaults they are the same each time, so that reading takes no part in the time: what a
    loader is measured against.
    """
    recipe = step.recipe
    if not loader.applies(recipe):
        batches = step.random_batches(recipe.seed)
        yield lambda: batches
        return
    sequences = recipe.batch.micro * recipe.batch.accumulate
    source = loader.RandomTokens(vocabulary(step.model), sequences, recipe.batch.seq, recipe.seed)
    with loader.Feed(recipe, source, step.device, range(num_steps)) as feed:
        yield feed.__next__
