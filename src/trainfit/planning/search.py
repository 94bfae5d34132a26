"""Search for the fastest recipe within a memory limit: a few traces, a ranking by the composed estimate, then
exact traces of those that rank highest.

1. The start is the recipe with every option that usually costs nothing.
2. It is traced at several micro-batches and levels of recomputation, and with each further option added.
3. All combinations are ranked by the composed estimate (composed.py).
4. The highest are traced. Each trace corrects the estimate of its structure, until none left ranks higher.
5. Options without which the best recipe is as fast are left out of it.
6. Options that are slow to trace (compilation) are added to the best recipe, and ranked with the others.
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainfit.catalog.load import gpu as find_gpu
from trainfit.planning.composed import Batches, Sizes, sizes_of, within
from trainfit.planning.estimates import Estimates, Request, Result
from trainfit.planning.frontier import pareto
from trainfit.planning.space import (
    OWN_FAMILY,
    Option,
    Options,
    Space,
    agree,
    changed,
    space,
    value_in,
)
from trainfit.spec.errors import InputError
from trainfit.spec.plan import Found, Plan, Rejection, flat, written
from trainfit.spec.recipe import Recipe
from trainfit.spec.units import GIB, format_bytes

MARGIN = 0.02
"""Share of the memory that stays free by default. The worst predicted peak was off by 0.08 %, a compiled
model's by up to 1 % (docs/results/accuracy.md); other processes' contexts take some hundred MiB."""
TIE = 0.01
"""Recipes whose speeds differ by less are equally fast: the simpler one is chosen."""
NUMERICS_GAIN = 0.02
"""A change of the numerics that gains less is not chosen."""
WORTH_TRACING = 0.003
"""A recipe is traced if it ranks at least this much above the fastest traced one."""
SLOW_GAIN = 0.1
"""Least share of a step outside matrix products and the update for which slow options are traced."""
MAX_EXTRAS = 4
"""Options beyond the start that are combined."""
MAX_ROUNDS = 4
NUM_TRACED = 2
"""Recipes traced in a round."""
NUM_FOUND = 4
"""Recipes reported as the best."""
NUM_FILLED = 2
"""Recipes traced to fill the frontier."""
TOKENS_OFF = 0.05
"""Share by which the tokens of a step may differ from those requested."""
GRID = (*range(1, 9), 10, 12, 14, *range(16, 33, 4), *range(40, 65, 8), *range(80, 129, 16))
GRID = (*GRID, *(2**n for n in range(8, 20)))
"""Micro-batches that are ranked."""
MOST_MICRO = 2**16
"""Micro-batches below it are tried where nothing else varies."""
MIX = "mix"
"""In place of a level of recomputation: blocks differ, as a budget decides."""


@dataclass(frozen=True)
class Goal:
    """Limits of a plan.

    Attributes:
        memory_bytes: of the device that may be used; None: all of it.
        margin: share of that which stays free.
        tokens_per_step: of all GPUs; None: the recipe's micro-batches, of any size.
        keep_quality: exclude what changes the numerics.
        vary: fields that may vary; empty: every field.
        fixed: fields that may not.
    """

    memory_bytes: int | None = None
    margin: float = MARGIN
    tokens_per_step: int | None = None
    keep_quality: bool = False
    vary: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()


class Candidate(NamedTuple):
    """One combination and its composed estimate."""

    rate: float
    """Tokens a second."""
    device_bytes: float
    options: Options
    level: str
    micro: int
    accumulate: int

    @property
    def key(self) -> "Key":
        return self.options, self.level, self.micro, self.accumulate


Key = tuple[Options, str, int, int]
"""Options, level of recomputation, micro-batch, micro-batches a step."""


class Traced(NamedTuple):
    """A candidate with its trace."""

    candidate: Candidate
    result: Result

    @property
    def rate(self) -> float:
        return self.result.estimate.tokens_per_s or 0.0 if self.result.estimate else 0.0

    @property
    def device_bytes(self) -> int:
        return self.result.estimate.peak_device_bytes if self.result.estimate else 0


def plan(
    recipe: Recipe, goal: Goal, estimates: Estimates, say: Callable[[str], None] = lambda text: None
) -> Plan:
    """Return the best recipes within the goal, the frontier, and why other choices lost.

    Args:
        say: called with a few words on what is being done.

    Raises:
        InputError: the recipe itself cannot be assembled, its GPU's speed is not known, or the goal cannot be
            met by any batch.
    """
    return Search(recipe, goal, estimates, say).run()


class Search:
    """One search."""

    def __init__(self, recipe: Recipe, goal: Goal, estimates: Estimates, say: Callable[[str], None]):
        gpu = find_gpu(recipe.hardware.gpu)
        if gpu.memory_bytes_per_s is None or not gpu.peak_flops_per_s:
            remedy = "name a GPU of the catalog with --gpu"
            raise InputError("its speed is not known", remedy, field="hardware.gpu", value=gpu.name)
        self.recipe, self.goal, self.estimates, self.say = recipe, goal, estimates, say
        self.limit_bytes = min(goal.memory_bytes or gpu.usable_bytes, gpu.usable_bytes)
        self.usable_bytes = self.limit_bytes * (1 - goal.margin)
        self.space: Space = space(recipe, vary=goal.vary, fixed=goal.fixed, keep_quality=goal.keep_quality)
        self.rejected = {option: reason for option, reason in self.space.excluded}
        self.start: Options = ()
        self.level = next((one for one in self.space.levels if one == '"none"'), self.space.levels[0])
        self.traced: dict[Key, Traced] = {}
        self.levels: dict[str, Sizes] = {}
        self.added: dict[Option, Sizes] = {}
        """Of the start with each option, at the reference batch."""
        self.without: dict[Option, Sizes] = {}
        """Of the start without each of its options, at the reference batch."""
        self.dropped: dict[Option, frozenset[Option]] = {}
        """Options of the start that each one excludes."""
        self.corrections: dict[tuple[Options, bool], tuple[float, float]] = {}
        self.num_ranked = 0
        self.largest: Traced | None = None

    def run(self) -> Plan:
        """Search, and return the plan."""
        self.say("tracing the starting recipe")
        self._find_start()
        if not self.space.options and len(self.space.levels) == 1 and not self.space.solves_recompute:
            self.say("tracing batches")
            self._find_largest()
            return self._plan(self._best())
        self._find_batch()
        self.say("tracing its options")
        self._add_options()
        self.say("tracing the recipes that rank highest")
        self._trace_highest(WORTH_TRACING)
        self._simplify()
        if self._add_slow():
            self._trace_highest(NUMERICS_GAIN)
        self._fill_frontier()
        return self._plan(self._best())

    # Recipes

    def recipe_of(
        self, options: Options, level: str, micro: int, accumulate: int, budget: float = 0
    ) -> Recipe:
        """Return the recipe of a combination.

        Raises:
            InputError: its values exclude each other.
        """
        values = agree(options)
        assert values is not None, "combinations whose options differ are not built"
        recompute = {"budget_gib": budget} if level == MIX else json.loads(level)
        values = {"recompute": recompute, **values}
        if self.space.varies_batch:
            values |= {"batch.micro": micro, "batch.accumulate": accumulate}
        return changed(self.recipe, values)

    def batches(self, options: Options, *, every: bool = False) -> list[tuple[int, int]]:
        """Return the micro-batches that a structure may have, each with its number of micro-batches.

        Args:
            every: not only those that are ranked.
        """
        batch, tokens = self.recipe.batch, self.goal.tokens_per_step
        if not self.space.varies_batch:
            return [(batch.micro, batch.accumulate)]
        grid = range(1, MOST_MICRO) if every else GRID
        if tokens is None:
            return [(micro, batch.accumulate) for micro in grid if micro * batch.seq < 2**31]
        wanted = tokens / (batch.seq * self.data_ranks(options))
        found = [
            (micro, max(1, round(wanted / micro))) for micro in grid if micro <= wanted * (1 + TOKENS_OFF)
        ]
        return [
            (micro, count) for micro, count in found if abs(micro * count - wanted) <= TOKENS_OFF * wanted
        ]

    def data_ranks(self, options: Options) -> int:
        """Return the ranks that read different data."""
        values, mesh = agree(options) or {}, self.recipe.parallel
        shared = [
            values.get(f"parallel.{name}", getattr(mesh, name)) for name in ("tensor", "context", "pipeline")
        ]
        ranks = self.recipe.hardware.count
        for one in shared:
            ranks //= one
        return max(1, ranks)

    def trace(self, wanted: Sequence[Key], *, exact: bool = False) -> list[Traced | InputError]:
        """Trace combinations of options, level and batch; a refusal in place of what cannot be built."""
        found: list[Traced | InputError] = []
        requests: list[tuple[int, Candidate, Request]] = []
        for options, level, micro, accumulate in wanted:
            candidate = Candidate(0.0, 0.0, options, level, micro, accumulate)
            try:
                recipe = self.recipe_of(options, level, micro, accumulate, self._budget_gib(options))
                requests.append((len(found), candidate, Request(recipe, exact)))
                found.append(InputError("", ""))
            except InputError as error:
                found.append(error)
        results = self.estimates.of([request for _, _, request in requests])
        for (index, candidate, _), result in zip(requests, results, strict=True):
            if result.refused is not None:
                found[index] = result.refused
                continue
            one = found[index] = Traced(candidate, result)
            self.traced[candidate.key] = one
        return found

    def fits(self, one: Traced) -> bool:
        """Return whether a traced recipe is within the limit, the margin kept."""
        estimate = one.result.estimate
        return estimate is not None and estimate.fits and estimate.peak_device_bytes <= self.usable_bytes

    def _budget_gib(self, options: Options) -> float:
        """Return the allocated bytes, in GiB, that leave room for what the device holds too."""
        other = self._sizes(options, self.level).other_bytes if self.levels else 0.0
        return max(0.01, round((self.usable_bytes - 1.05 * other) / GIB - 0.005, 2))

    # Traces

    def _find_start(self) -> None:
        """Take every option that usually costs nothing, and drop those that the recipe refuses."""
        chosen: list[Option] = []
        for option in self.space.options:
            if option.is_start and option.family not in {one.family for one in chosen}:
                chosen.append(option)
        while True:
            self.start = tuple(chosen)
            batches = self.batches(self.start)
            if not batches:
                per_rank = (
                    f"{self.data_ranks(self.start)} data-parallel ranks of {self.recipe.batch.seq} tokens"
                )
                problem = f"no whole number of sequences for {per_rank} has so many tokens"
                remedy = f"request a multiple of {self.data_ranks(self.start) * self.recipe.batch.seq}"
                raise InputError(problem, remedy, field="tokens_per_step", value=self.goal.tokens_per_step)
            found = self.trace([(self.start, self.level, *each) for each in batches[:2]])
            refused = next((one for one in found if isinstance(one, InputError)), None)
            if refused is None:
                return
            if not chosen:
                raise refused
            option = _named_in(refused, chosen) or chosen[-1]
            self.rejected[option] = refused.problem
            chosen.remove(option)

    def _start_sizes(self, level: str) -> dict[int, Sizes]:
        return {
            one.candidate.micro: _sizes(one)
            for (options, at, _, _), one in self.traced.items()
            if options == self.start and at == level
        }

    def _find_batch(self) -> None:
        """Choose the micro-batch at which options are compared: the smallest that is as fast as any."""
        known = self._start_sizes(self.level)
        grown = Batches.of(known)
        first = min(known)
        rates: dict[tuple[int, int], float] = {}
        for micro, count in self.batches(self.start):
            sizes = grown.moved(known[first], first, micro)
            if sizes.device_bytes <= self.usable_bytes or not rates:
                rates[micro, count] = micro * count / sizes.step_s(count)
        most = max(rates.values())
        self.at = next(each for each, rate in rates.items() if rate >= (1 - TIE) * most)

    def _find_largest(self) -> None:
        """Trace micro-batches until the largest that fits and the next one, which does not, are known."""
        allowed = self.batches(self.start, every=True)
        for _ in range(MAX_ROUNDS):
            known = {one.candidate.micro: self.fits(one) for one in self.traced.values()}
            low = max((micro for micro, fits in known.items() if fits), default=0)
            high = min((micro for micro, fits in known.items() if not fits), default=allowed[-1][0] + 1)
            between = [each for each in allowed if low < each[0] < high]
            if not between:
                break
            sizes = self._start_sizes(self.level)
            nearest = min(sizes, key=lambda micro: abs(micro - high))
            grown = Batches.of(sizes)
            fitting = [
                index
                for index, (micro, _) in enumerate(between)
                if grown.moved(sizes[nearest], nearest, micro).device_bytes <= self.usable_bytes
            ]
            last = fitting[-1] if fitting else 0
            self.trace([(self.start, self.level, *each) for each in between[max(0, last) : last + 2]])
        fits = [one for one in self.traced.values() if self.fits(one)]
        self.largest = max(fits, key=lambda one: one.candidate.micro, default=None)
        if self.largest is not None:
            self._find_batch()
            self.trace([(self.start, self.level, *self.at)])
        self.levels = {self.level: next(iter(self._start_sizes(self.level).values()))}

    def _add_options(self) -> None:
        """Trace the start at each level, without each of its options, and with each other one."""
        reference = next(one for (o, _, _, _), one in self.traced.items() if o == self.start)
        extras: list[Option] = []
        levels = [(self.start, level, *self.at) for level in self.space.levels]
        removable = [option for option in self.start if option.family != OWN_FAMILY]
        without = [(self._ordered(set(self.start) - {one}), self.level, *self.at) for one in removable]
        added: list[Key] = []
        for option in self.space.options:
            if option in self.start or option in self.rejected:
                continue
            reason = self._not_worth(option, reference)
            structure = self._with(option, self.start) if reason is None else None
            if structure is None:
                self.rejected.setdefault(option, reason or "excludes what the start needs")
            elif not option.is_slow:
                extras.append(option)
                added.append((structure, self._level_of(option), *self._batch_for(structure)))
        found = iter(self.trace([*levels, *without, *added]))
        for level, one in zip(self.space.levels, found, strict=False):
            if isinstance(one, Traced):
                self.levels[level] = _sizes(one)
        if self.level not in self.levels:
            self.level = next(iter(self.levels))
        for option, one in zip(removable, found, strict=False):
            if isinstance(one, Traced):
                self.without[option] = _sizes(one)
        for option, one in zip(extras, found, strict=True):
            if isinstance(one, InputError):
                self.rejected[option] = one.problem
            else:
                self.added[option] = self._moved(one)
        self.grown = Batches.of(self._start_sizes(self.level))

    def _moved(self, one: Traced) -> Sizes:
        """Return a traced recipe's sizes at the reference batch."""
        grown = Batches.of(self._start_sizes(self.level))
        return grown.moved(_sizes(one), one.candidate.micro, self.at[0])

    def _add_slow(self) -> bool:
        """Trace the best recipe, or the smallest, with each slow option; return whether there are any."""
        slow = [one for one in self.space.options if one.is_slow and one not in self.rejected]
        before = self._best() or min(self.traced.values(), key=lambda one: one.device_bytes)
        at = before.candidate
        structures = [(one, self._with(one, at.options)) for one in slow]
        level = self.level if at.level == MIX else at.level
        wanted = [(one, (some, level, at.micro, at.accumulate)) for one, some in structures if some]
        self.say(f"tracing {', '.join(one.label for one, _ in wanted)}")
        for (option, _), found in zip(wanted, self.trace([key for _, key in wanted]), strict=True):
            if isinstance(found, InputError):
                self.rejected[option] = found.problem
                continue
            start = self.levels[self.level]
            without = self.grown.moved(self._sizes(at.options, level), self.at[0], at.micro)
            if at.level != MIX:
                without = _sizes(before)
            self.added[option] = start.plus(
                self._moved(found), self.grown.moved(without, at.micro, self.at[0])
            )
        return bool(wanted)

    def _batch_for(self, structure: Options) -> tuple[int, int]:
        """Return the batch nearest to the reference that a structure may have."""
        allowed = self.batches(structure)
        return min(allowed, key=lambda each: abs(each[0] - self.at[0]), default=self.at)

    def _level_of(self, option: Option) -> str:
        forced = dict(option.values).get("recompute")
        return self.level if forced is None else json.dumps(forced)

    def _not_worth(self, option: Option, reference: Traced) -> str | None:
        """Return why an option need not be traced, or None."""
        estimate = reference.result.estimate
        assert estimate is not None
        assert estimate.time is not None
        assert estimate.step_s
        if option.speeds_up == "rest":
            rest = estimate.step_s - estimate.time.matmul_s - reference.result.update_s
            if rest < SLOW_GAIN * estimate.step_s:
                share = max(0.0, rest / estimate.step_s)
                return f"could gain {share:.0%} at most, without matrix products and the update"
        mesh = self.recipe.mesh
        values = dict(option.values)
        if values.get("parallel.strategy", mesh.strategy) not in ("auto", "fsdp"):
            width = 2 if self.recipe.precision in ("bf16", "fp8") else 4
            whole = width * (estimate.params + estimate.trainable_params)
            if whole > self.usable_bytes:
                return f"weights and gradients alone take {format_bytes(whole)} on every GPU"
        return None

    def _with(self, option: Option, options: Options) -> Options | None:
        """Return a structure with an option, without those that it excludes; None: it is refused."""
        kept = [one for one in options if one.family != option.family and agree((one, option)) is not None]
        while True:
            structure = self._ordered([*kept, option])
            try:
                self.recipe_of(structure, self._level_of(option), *self._batch_for(structure))
            except InputError as error:
                named = _named_in(error, kept)
                if named is None:
                    self.rejected[option] = error.problem
                    return None
                kept.remove(named)
                continue
            self.dropped[option] = frozenset(self.start) - frozenset(kept)
            return structure

    def _ordered(self, options: Collection[Option]) -> Options:
        return tuple(one for one in self.space.options if one in options)

    # Ranking

    def _sizes(self, options: Options, level: str) -> Sizes:
        """Return the composed sizes of a structure at the reference batch."""
        start = self.levels[self.level]
        base = self.levels.get(level, start)
        found = start
        for option in options:
            if option in self.added:
                found = found.plus(self.added[option], self.levels.get(self._level_of(option), start))
        ratio = base.batch_bytes / max(start.batch_bytes, 1.0)
        return found._replace(
            batch_bytes=found.batch_bytes * ratio,
            micro_s=max(1e-9, found.micro_s + base.micro_s - start.micro_s),
        )

    def structures(self) -> Iterator[Options]:
        """Yield the start and each combination of the other options that are worth it."""
        extras = [option for option in self.added if self._is_useful(option)]
        for count in range(min(MAX_EXTRAS, len(extras)) + 1):
            for some in itertools.combinations(extras, count):
                if len({one.family for one in some}) < count:
                    continue
                without = frozenset[Option]().union(*(self.dropped[one] for one in some))
                structure = self._ordered([*(one for one in self.start if one not in without), *some])
                if agree(structure) is not None:
                    yield structure

    def _is_useful(self, option: Option) -> bool:
        """Return whether an option makes the start smaller or faster."""
        before, after = self.levels.get(self._level_of(option), self.levels[self.level]), self.added[option]
        ranks = self._more_ranks(option)
        smaller = after.device_bytes < before.device_bytes or after.fixed_bytes < before.fixed_bytes
        return smaller or after.step_s(1) / ranks < before.step_s(1)

    def _more_ranks(self, option: Option) -> float:
        """Return the data-parallel ranks with an option over those of the start."""
        return self.data_ranks((option,)) / self.data_ranks(self.start)

    def ranked(self) -> list[Candidate]:
        """Return every combination within the limit by the composed estimate, the fastest first."""
        found: list[Candidate] = []
        self.num_ranked = 0
        for options in self.structures():
            forced = [level for level in map(self._level_of, options) if level != self.level]
            levels = forced[:1] or [level for level in self.space.levels if level in self.levels]
            sizes = {level: self._sizes(options, level) for level in levels}
            tokens = self.recipe.batch.seq * self.data_ranks(options)
            for micro, count in self.batches(options):
                moved = {level: self.grown.moved(one, self.at[0], micro) for level, one in sizes.items()}
                self.num_ranked += len(moved)
                found += self._fitting(options, moved, micro, count, tokens)
                if all(one.device_bytes > 2 * self.usable_bytes for one in moved.values()):
                    break
        return sorted(found, reverse=True, key=lambda one: (one.rate, -one.device_bytes))

    def _fitting(
        self, options: Options, moved: dict[str, Sizes], micro: int, count: int, tokens: int
    ) -> Iterator[Candidate]:
        """Yield the candidates of one structure and batch that are within the limit."""
        for level, sizes in moved.items():
            size_off, time_off = self.corrections.get((options, False), (1.0, 1.0))
            if sizes.device_bytes * size_off <= self.usable_bytes:
                rate = micro * count * tokens / (sizes.step_s(count) * time_off)
                yield Candidate(rate, sizes.device_bytes * size_off, options, level, micro, count)
        if self.space.solves_recompute and len(moved) > 1 and self._can_mix(options):
            size_off, time_off = self.corrections.get((options, True), (1.0, 1.0))
            mix = within(tuple(moved.values()), self.usable_bytes / size_off)
            if mix is not None and all(mix is not one for one in moved.values()):
                rate = micro * count * tokens / (mix.step_s(count) * time_off)
                yield Candidate(rate, self.usable_bytes, options, MIX, micro, count)

    def _can_mix(self, options: Options) -> bool:
        """Return whether blocks may recompute differently in a structure."""
        values = agree(options) or {}
        return values.get("parallel.tensor", self.recipe.parallel.tensor) == 1

    def _trace_highest(self, worth: float) -> None:
        """Trace what ranks highest until nothing left ranks that share above the fastest traced recipe."""
        tried: set[Key] = set()
        for _ in range(MAX_ROUNDS):
            best = max((one.rate for one in self.traced.values() if self.fits(one)), default=0.0)
            chosen: list[Candidate] = []
            for one in self.ranked():
                if one.rate < best * (1 + worth) or len(chosen) >= NUM_TRACED:
                    break
                new = one.key not in tried and one.key not in self.traced
                if new and one.key[:2] not in {each.key[:2] for each in chosen}:
                    chosen.append(one)
            if not chosen:
                return
            tried.update(one.key for one in chosen)
            for candidate, one in zip(chosen, self.trace([one.key for one in chosen]), strict=True):
                self._correct(candidate, one)

    def _correct(self, candidate: Candidate, one: Traced | InputError) -> None:
        """Correct the composed estimate of a structure by its trace; a refused one never ranks again."""
        key = candidate.options, candidate.level == MIX
        size_off, time_off = self.corrections.get(key, (1.0, 1.0))
        if isinstance(one, InputError):
            self.corrections[key] = (1e6, 1e6) if candidate.level != MIX else (size_off * 1.05, time_off)
            return
        size_off *= one.device_bytes / max(candidate.device_bytes, 1.0)
        self.corrections[key] = size_off, time_off * candidate.rate / max(one.rate, 1e-9)

    # The choice

    def _best(self) -> Traced | None:
        """Return the fastest that fits; of ties the simplest, then the smallest."""
        fitting = [one for one in self.traced.values() if self.fits(one)]
        if not fitting:
            return None
        most = max(one.rate for one in fitting)

        def is_tied(one: Traced) -> bool:
            share = TIE if self._numerics(one) else NUMERICS_GAIN
            return one.rate >= (1 - share) * most

        tied = [one for one in fitting if is_tied(one)]
        most = max(one.rate for one in tied if self._numerics(one) == min(map(self._numerics, tied)))
        tied = [one for one in tied if one.rate >= (1 - TIE) * most]
        return min(tied, key=lambda one: (self._numerics(one), self._complexity(one), one.device_bytes))

    def _numerics(self, one: Traced) -> int:
        return sum(bool(option.numerics) for option in one.candidate.options)

    def _complexity(self, one: Traced) -> int:
        """Return how many fields differ from the given recipe's, without batches and the implementation."""
        options = [option for option in one.candidate.options if option.family != OWN_FAMILY]
        level = {json.dumps(value_in(self.recipe, "recompute")): 0, MIX: 2}.get(one.candidate.level, 1)
        return sum(len(option.values) for option in options) + level

    def _simplify(self) -> None:
        """Trace the best recipe without the options that gain nothing together."""
        best = self._best()
        if best is None:
            return
        at, start = best.candidate, self.levels[self.level]
        losses = {one: sizes.step_s(1) / start.step_s(1) - 1 for one, sizes in self.without.items()}
        needless: set[Option] = set()
        for option in sorted(set(losses) & set(at.options), key=lambda one: (losses[one], one.label)):
            smaller = self.without[option].device_bytes > start.device_bytes * (1 + TIE)
            if not smaller and sum(map(losses.__getitem__, needless), losses[option]) < TIE / 2:
                needless.add(option)
        if needless:
            self.trace([(self._ordered(set(at.options) - needless), *at.key[1:])])

    def _fill_frontier(self) -> None:
        """Trace recipes between the smallest and the largest known ones, where the frontier has gaps."""
        ranking = self.ranked()
        if not ranking:
            return
        least = min(one.device_bytes for one in ranking)
        targets = [least + (self.usable_bytes - least) * step / NUM_FILLED for step in range(NUM_FILLED)]
        pure = [one for one in ranking if one.level != MIX]
        inside = ((one for one in pure if one.device_bytes <= target) for target in targets)
        keys = dict.fromkeys(best.key for some in inside if (best := next(some, None)) is not None)
        self.trace([key for key in keys if key not in self.traced])

    # The plan

    def _plan(self, best: Traced | None) -> Plan:
        every = [one for one in self.traced.values() if one.result.estimate is not None]
        fitting = sorted((one for one in every if self.fits(one)), key=lambda one: -one.rate)
        if best is not None:
            fitting = [best, *(one for one in fitting if one is not best)][:NUM_FOUND]
        found = [self._exact(one) for one in fitting]
        least = min(every, key=lambda one: one.device_bytes)
        return Plan(
            given=self.recipe.content(),
            limit_bytes=int(self.limit_bytes),
            margin=self.goal.margin,
            tokens_per_step=self.goal.tokens_per_step,
            keep_quality=self.goal.keep_quality,
            found=tuple(one for one in found if one.estimate.fits),
            frontier=tuple(map(self.found, pareto(every, lambda one: (one.device_bytes, one.rate)))),
            largest=self.found(self.largest) if self.largest else None,
            least=None if found else self.found(least),
            rejected=tuple(self._rejections(best)),
            num_ranked=self.num_ranked,
            num_traced=len(self.traced),
        )

    def _exact(self, one: Traced) -> Found:
        """Return a candidate with its exact estimate."""
        (result,) = self.estimates.of([Request(one.result.recipe, exact=True)])
        return self.found(one._replace(result=result) if result.estimate is not None else one)

    def found(self, one: Traced) -> Found:
        """Return a traced candidate as a plan reports it."""
        recipe, estimate = one.result.recipe, one.result.estimate
        assert estimate is not None
        before, after = (flat(each.model_dump(mode="json")) for each in (self.recipe, recipe))
        changes = [written(field, value) for field, value in after.items() if before.get(field) != value]
        numerics = [option.numerics for option in one.candidate.options if option.numerics]
        return Found(
            recipe=recipe.content(), changes=tuple(changes), numerics=tuple(numerics), estimate=estimate
        )

    def _rejections(self, best: Traced | None) -> Iterator[Rejection]:
        """Yield each choice that the best recipe does not have, with the reason."""
        chosen = best.candidate.options if best else ()
        start = self.levels[self.level]
        for option in (*self.space.options, *(one for one, _ in self.space.excluded)):
            if option in chosen:
                continue
            if option in self.rejected:
                yield Rejection(choice=option.label, reason=self.rejected[option])
            elif option in self.added:
                reason = _compared(self.added[option], start, self._more_ranks(option))
                yield Rejection(choice=option.label, reason=reason)
            elif option in self.start:
                yield Rejection(choice=option.label, reason="no faster, within 1 %, so left out")
            elif option.is_slow:
                yield Rejection(choice=option.label, reason="the best recipe without it excludes it")
        level = best.candidate.level if best else ""
        for other, sizes in self.levels.items():
            if other not in (level, self.level):
                label = f"recompute: {json.loads(other)}"
                yield Rejection(choice=label, reason=_compared(sizes, start, 1.0))


def _compared(sizes: Sizes, before: Sizes, ranks: float) -> str:
    """Return how a recipe differs from another: time a token and memory."""
    time = sizes.step_s(1) / ranks / before.step_s(1) - 1
    memory = sizes.device_bytes - before.device_bytes
    speed = "as fast" if abs(time) < 0.005 else f"{abs(time):.1%} {'slower' if time > 0 else 'faster'}"
    size = f"{format_bytes(abs(memory))} {'more' if memory > 0 else 'less'}"
    return f"{speed}, {size}" if abs(memory) > GIB / 100 else f"{speed}, no smaller"


def _sizes(one: Traced) -> Sizes:
    assert one.result.estimate is not None
    return sizes_of(one.result.estimate, one.result.update_s, one.candidate.accumulate)


def _named_in(error: InputError, options: Sequence[Option]) -> Option | None:
    """Return the option with the field that a refusal names."""
    for option in options:
        if any(f"{field}.".startswith(f"{error.field}.") for field, _ in option.values if error.field):
            return option
    return None
