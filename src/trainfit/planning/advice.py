"""The changes with which a recipe that is too large fits, and the GPUs on which it does."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from trainfit.catalog.load import gpu as find_gpu
from trainfit.catalog.load import gpus, model_config
from trainfit.planning.answer import Request, Result
from trainfit.planning.estimates import Estimates
from trainfit.planning.search.candidate import MARGIN, Combinations, Goal, Key, Traced
from trainfit.planning.search.plan import found as as_found
from trainfit.planning.search.space import (
    MICRO_BATCH,
    OWN_FAMILY,
    RECOMPUTE,
    Option,
    Options,
    agree,
    changed,
    offered,
)
from trainfit.prediction.device_overhead import group_bytes
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.plan import Advice, Found, written
from trainfit.spec.recipe import Parallel, Recipe
from trainfit.spec.result import Estimate
from trainfit.techniques.base import AS_BEFORE, Expected

MOST_CHANGES = 3
TRIES = 2
"""Most kinds of GPU, numbers of GPUs and doubtful changes that are predicted."""
FULL = Option(RECOMPUTE, ((RECOMPUTE, "full"),))
LOGITS_BYTES = 14
"""Most bytes that a logit holds at once: its value, its fp32 copy, log-softmax and gradient."""
TOLERANCE = 0.8
"""Share of the expected device memory that a change may turn out to take."""
ENOUGH = 2
"""Number of changes that fit from which doubtful changes, and pairs of changes, are not traced any more."""
LIMIT_S = 60.0
"""Time after which no further recipe is traced; one that is being traced is finished."""
HOST_BYTES = 256 * 2**30
"""Pinned memory for each GPU that a change may take: a host of eight GPUs with 2 TiB has so much."""
MOST_OF_FAMILY = 2
"""Most options of one technique that are named, such as two and four tensor-parallel ranks."""


class Size(NamedTuple):
    """Expected memory of a changed recipe, and its step time over that before."""

    device_bytes: float
    host_bytes: float
    time_ratio: float


def expected(recipe: Recipe, own: Estimate, effect: Expected) -> Size:
    """Return the size that a recipe is expected to have after a change with an effect.

    Args:
        own: estimate of the recipe before the change.
    """
    held = own.breakdown
    others = held.activations + held.temporary
    logits = min(others, _logits_bytes(recipe))
    allocated = (
        held.weights * effect.weights
        + held.gradients * effect.gradients
        + held.optimizer * effect.optimizer
        + (others - logits) * effect.activations
        + logits * effect.logits
        + held.communication * effect.communication
        + held.workspace
    )
    highest = own.highest
    other = highest.device - highest.reserved
    # What the allocator cannot use grows with what it holds.
    unused = highest.reserved / max(1, highest.allocated)
    host = (held.weights + held.optimizer) * effect.to_host
    return Size(allocated * unused + other, host, effect.time)


def _logits_bytes(recipe: Recipe) -> int:
    """Return the most that logits take; 0 where few are there at once, or the fullest GPU may have none."""
    if recipe.loss != "standard" or recipe.mesh.pipeline > 1:
        return 0
    tokens = recipe.rank_tokens // recipe.batch.accumulate
    vocabulary = model_config(recipe.model.config).get("vocab_size", 2**15)
    vocabulary = vocabulary if isinstance(vocabulary, int) else 2**15
    return LOGITS_BYTES * tokens * vocabulary // (recipe.mesh.tensor * recipe.mesh.context)


def as_offered(recipe: Recipe, option: Option) -> Expected:
    """Return what is expected of an option in a recipe, which may have other changes already."""
    return next((one.expected for one in offered(recipe) if one.values == option.values), option.expected)


class Deadline:
    """A deadline for traces, and whether it left any out.

    Args:
        until_s: the time (``time.monotonic``).
    """

    def __init__(self, until_s: float = math.inf):
        self.until_s = until_s
        self.is_complete = True

    def skips(self) -> bool:
        """Return whether the deadline has passed; if so, remember that a trace was left out."""
        is_over = time.monotonic() >= self.until_s
        self.is_complete = self.is_complete and not is_over
        return is_over

    def of(self, estimates: Estimates, recipe: Recipe, *, exact: bool = True) -> Result:
        """Return one estimate, whose plan of recomputation stops at the time."""
        (result,) = estimates.of([Request(recipe, exact, self.until_s)])
        self.is_complete = self.is_complete and result.is_complete
        return result


def _silent(text: str) -> None:
    """Report no progress."""


def advise(
    recipe: Recipe,
    found: Estimate,
    estimates: Estimates,
    say: Callable[[str], None] = _silent,
    limit_s: float = LIMIT_S,
) -> Advice:
    """Return changes and GPUs with which a recipe that does not fit would fit.

    Args:
        found: the recipe's own prediction.
        say: called with what is tried next.
        limit_s: time after which nothing more is tried.

    Raises:
        InputError: as ``planning.search.search.plan``.
    """
    deadline = Deadline(time.monotonic() + limit_s)
    say("a larger GPU")
    gpu = first_fitting(recipe, _larger_gpus(recipe, found), estimates, deadline)
    say("more GPUs")
    gpus = first_fitting(recipe, more_gpus(recipe, found), estimates, deadline)
    goal = Goal(host_bytes=HOST_BYTES)
    changes = changes_that_fit(recipe, found, goal, estimates, say=say, deadline=deadline)
    return Advice(changes=tuple(changes), gpu=gpu, gpus=gpus, is_complete=deadline.is_complete)


def _larger_gpus(recipe: Recipe, found: Estimate) -> list[dict[str, object]]:
    """Return the smallest GPUs that hold the predicted peak with a margin.

    Those that can be rented at a known price, and on which steps were measured, come first.
    """
    own = find_gpu(recipe.hardware.gpu)

    def can(row: Gpu) -> bool:
        supported = "bf16" in row.peak_flops_per_s or "bf16" not in own.peak_flops_per_s
        room = found.highest.device <= row.usable_bytes * (1 - MARGIN)
        return row.basis != "accounted" and row.vendor == own.vendor and supported and room

    def order(row: Gpu) -> tuple[bool, int, float]:
        is_known = row.price_per_hour is not None and row.basis == "measured"
        return not is_known, row.usable_bytes, row.price_per_hour or math.inf

    able = sorted(filter(can, gpus().values()), key=order)
    # A price of one's own is of the GPU that the recipe names.
    return [{"hardware.gpu": one.name, "hardware.price_per_hour": None} for one in able[:TRIES]]


def more_gpus(recipe: Recipe, found: Estimate) -> list[dict[str, object]]:
    """Return the smallest numbers of GPUs that may hold the recipe with its state sharded over them.

    Where the activations alone are too large, or these numbers may not be enough, the same with full
    recomputation.
    """
    if recipe.parallel not in (Parallel(), Parallel(strategy="fsdp")):
        return []
    own, held, count = find_gpu(recipe.hardware.gpu), found.breakdown, recipe.hardware.count
    sharded = (held.weights + held.gradients + held.optimizer) * count
    nccl = 0 if count > 1 else group_bytes(own)
    peaks: list[tuple[dict[str, object], float]] = [({}, found.highest.device)]
    if recipe.recompute == "none":
        with suppress(InputError):
            changed(recipe, dict(FULL.values))
            peaks.append((dict(FULL.values), expected(recipe, found, as_offered(recipe, FULL)).device_bytes))
    tried: list[dict[str, object]] = []
    for values, peak_bytes in peaks:
        room = own.usable_bytes * (1 - MARGIN) - (peak_bytes - sharded / count) - nccl
        if room > 0:
            least = max(2 * count, 2 ** math.ceil(math.log2(sharded / room)))
            tried += [{"hardware.count": least * 2**more, **values} for more in range(TRIES)]
    return tried


def first_fitting(
    recipe: Recipe,
    several: Iterable[dict[str, object]],
    estimates: Estimates,
    deadline: Deadline | None = None,
) -> Found | None:
    """Return the recipe with the first of several sets of values that makes it fit; None: none, in time."""
    deadline = deadline or Deadline()
    for values in several:
        try:
            other = changed(recipe, values)
        except InputError:
            continue
        if deadline.skips():
            break
        result = deadline.of(estimates, other, exact=False)
        at = result.estimate
        if at is not None and abs(at.headroom_bytes) < MARGIN * at.device_bytes:
            if deadline.skips():
                break
            result = deadline.of(estimates, other)
        if (one := _found(result, values)) is not None:
            return one
    return None


def _found(result: Result, values: dict[str, object]) -> Found | None:
    """Return a result that fits, with the values that were set; None where it does not."""
    estimate = result.estimate
    if estimate is None or not estimate.fits:
        return None
    changes = tuple(written(field, value) for field, value in values.items() if value is not None)
    return Found(recipe=result.recipe.content(), changes=changes, numerics=(), estimate=estimate)


class _Search:
    """Traces changes of one recipe until enough of them fit.

    Args:
        own: the recipe's own prediction.
        say: called with what is traced next.
        deadline: nothing is traced later; None: all is traced.
    """

    def __init__(
        self,
        combinations: Combinations,
        own: Estimate,
        most: int,
        say: Callable[[str], None] = _silent,
        deadline: Deadline | None = None,
    ):
        self.combinations, self.own, self.most = combinations, own, most
        self.say, self.deadline = say, deadline or Deadline()
        self.fitting: list[Found] = []
        self.alone: dict[Option, Traced] = {}
        """Changes that were traced alone."""
        self._families: Counter[str] = Counter()

    def key(self, changes: Options) -> Key:
        """Return the combination of changes, with as many tokens a step as the recipe has."""
        space, batch = self.combinations.space, self.combinations.recipe.batch
        options = tuple(one for one in space.options if one in changes)
        level = next((json for json, one in space.levels.items() if one in changes), next(iter(space.levels)))
        batches = (tuple(value for _, value in one.values) for one in changes if one.family == MICRO_BATCH)
        micro, count = next(batches, (batch.micro, batch.accumulate))
        in_all, ranks = count * self.combinations.data_ranks(()), self.combinations.data_ranks(options)
        return options, level, micro, count if in_all % ranks else in_all // ranks

    def expected(self, changes: Options) -> Size | None:
        """Return the expected size with changes; None: no less than without, or they are refused."""
        key = self.key(changes)
        if agree(key[0]) is None:
            return None
        before, own, known = self.combinations.recipe, self.own, None
        for change in changes:
            found = self.alone.get(change)
            at = found and found.result.estimate
            if found and at and at.highest.device < own.highest.device:
                before, own, known = found.result.recipe, at, change
        try:
            self.combinations.recipe_of(*key)
        except InputError:
            return None
        effect, at = AS_BEFORE, before
        for change in changes:
            if change != known:
                effect = effect.then(as_offered(at, change))
                with suppress(InputError):  # Two changes may only be possible together.
                    at = changed(at, dict(change.values))
        one = expected(before, own, effect)
        is_less = one.device_bytes < own.highest.device
        return one if is_less and one.host_bytes <= self.combinations.host_bytes else None

    def trace(self, several: Iterable[Options]) -> None:
        """Trace the changes that are expected to fit, the fastest first, and a few doubtful ones."""
        usable = self.combinations.usable_bytes
        found = [(changes, one) for changes in several if (one := self.expected(changes)) is not None]
        ranked = [each for each in found if TOLERANCE * each[1].device_bytes <= usable]
        numerics = {changes: sum(bool(one.numerics) for one in changes) for changes, _ in ranked}
        ranked.sort(key=lambda each: (numerics[each[0]], each[1].time_ratio, each[1].device_bytes))
        for changes, one in ranked:
            if one.device_bytes <= usable and len(self.fitting) < self.most:
                self._trace(changes)
        doubtful = sorted(
            (one.device_bytes, at) for at, (_, one) in enumerate(ranked) if one.device_bytes > usable
        )
        for _, at in doubtful[:TRIES]:
            if len(self.fitting) < ENOUGH:
                self._trace(ranked[at][0])

    def _trace(self, changes: Options) -> None:
        families = [one.family for one in changes if one.family not in (RECOMPUTE, MICRO_BATCH)]
        if any(self._families[each] >= MOST_OF_FAMILY for each in families) or self.deadline.skips():
            return
        self.say(" and ".join(one.label for one in changes))
        (one,) = self.combinations.trace([self.key(changes)])
        if isinstance(one, InputError):
            return
        if len(changes) == 1:
            self.alone[changes[0]] = one
        if not self.combinations.fits(one):
            return
        found = as_found(self.combinations.recipe, one)
        if any(is_as_good(other, found) for other in self.fitting):
            return
        self.fitting.append(found)
        self._families.update(families)

    def plan_recompute(self) -> None:
        """Plan ``recompute: fit``, if full recomputation is, or may be, enough in the whole GPU's memory.

        It is the fastest of all that recomputation alone can do, and takes several times as long to find.
        """
        combinations = self.combinations
        full = next((one for one in _levels(combinations) if one.values == FULL.values), None)
        if combinations.goal.memory_bytes is not None or full is None:
            return
        known = self.alone.get(full)
        one = self.expected((full,))
        size = known.device_bytes if known else TOLERANCE * one.device_bytes if one else math.inf
        if size > combinations.usable_bytes or self.deadline.skips():
            return
        self.say("recompute: fit")
        recipe = combinations.recipe.model_copy(update={"recompute": "fit"})
        result = self.deadline.of(combinations.estimates, recipe)
        self.fitting += filter(None, [_found(result, {"recompute": "fit"})])


def changes_that_fit(
    recipe: Recipe,
    own: Estimate,
    goal: Goal,
    estimates: Estimates,
    *,
    most: int = MOST_CHANGES,
    say: Callable[[str], None] = _silent,
    deadline: Deadline | None = None,
) -> list[Found]:
    """Return the recipe with changes that fit: one each, or two where hardly any single one is enough.

    Those that keep the mathematics come first, of these the fastest. A change is another level of
    recomputation, a smaller micro-batch with as many more of them, or one option of a technique. Only what is
    expected to be enough is traced (``expected``). Options that are slow to trace, and other models, are not
    tried. Where full recomputation may fit in the GPU's memory, ``recompute: fit``, which is faster, is too.

    Args:
        own: the recipe's own prediction.
        goal: limits; without ``tokens_per_step`` the recipe's own tokens are kept.
        most: number of recipes returned.
        say: called with what is tried next.
        deadline: nothing is tried later; None: all is tried.

    Raises:
        InputError: as ``planning.search.search.plan``.
    """
    if goal.tokens_per_step is None:
        goal = Goal(**{**vars(goal), "tokens_per_step": recipe.step_tokens})
    combinations = Combinations(recipe, goal, estimates)
    search, usable = _Search(combinations, own, most, say, deadline), combinations.usable_bytes
    micro, count = recipe.batch.micro, recipe.batch.accumulate
    dividing = [
        each for each in combinations.batches(()) if each[0] < micro and each[0] * each[1] == micro * count
    ]
    smaller = [_batch(recipe, *each) for each in dividing]
    enough = [one for one in smaller if (found := search.expected((one,))) and found.device_bytes <= usable]
    changes = [*_levels(combinations), *dict.fromkeys([*smaller[:1], *enough[-1:]])]
    changes += [one for one in combinations.space.options if not one.is_slow and one.family != OWN_FAMILY]
    search.trace((one,) for one in changes)
    if len(search.fitting) < ENOUGH:
        known = search.alone
        lacking = [one for one in changes if one not in known or not combinations.fits(known[one])]
        pairs = itertools.combinations(lacking, 2)
        search.trace((one, other) for one, other in pairs if one.family != other.family)
    search.plan_recompute()
    return sorted(search.fitting, key=lambda one: (bool(one.numerics), -_rate(one)))[:most]


def _levels(combinations: Combinations) -> list[Option]:
    """Return the levels of recomputation other than the recipe's own."""
    return list(combinations.space.levels.values())[1:]


def _batch(recipe: Recipe, micro: int, count: int) -> Option:
    """Return a smaller micro-batch, with as many more of them a step."""
    share = micro / recipe.batch.micro
    fewer = Expected(activations=share, logits=share, time=1.02)
    return Option(MICRO_BATCH, (("batch.micro", micro), ("batch.accumulate", count)), fewer)


def is_as_good(one: Found, other: Found) -> bool:
    """Return whether a recipe is as fast as another one while making only some of its changes."""
    return set(one.changes) < set(other.changes) and _rate(one) >= _rate(other)


def _rate(found: Found) -> float:
    return found.estimate.tokens_per_s or 0.0
