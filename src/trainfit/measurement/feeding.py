"""Batches of measured steps: one that stays on the device, or random tokens through the recipe's loader."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainfit.measurement.feed import Feed, RandomTokens
from trainfit.spec.recipe import Loader
from trainfit.step import Batch, Step, vocabulary


@contextmanager
def feeding(step: Step, num_steps: int) -> Iterator[Callable[[], list[Batch]]]:
    """A function that gives each of at most ``num_steps`` steps its micro-batches.

    With the loader's defaults they are the same each time, so that reading takes no part in the time: what a
    loader is measured against.
    """
    recipe = step.recipe
    if recipe.loader == Loader():
        batches = step.random_batches(recipe.seed)
        yield lambda: batches
        return
    sequences = recipe.batch.micro * recipe.batch.accumulate
    source = RandomTokens(vocabulary(step.model), sequences, recipe.batch.seq, recipe.seed)
    with Feed(recipe, source, step.device, range(num_steps)) as feed:
        yield feed.__next__
