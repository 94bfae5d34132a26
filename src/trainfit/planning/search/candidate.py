"""Combinations of options, recomputation and batch: their recipes, their traces, and which ones fit."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from trainfit.catalog.load import gpu as find_gpu
from trainfit.planning.answer import Request, Result
from trainfit.planning.estimates import Estimates
from trainfit.planning.search.space import Option, Options, Space, agree, changed, space
from trainfit.rl.estimate.names import of_update_alone
from trainfit.spec.errors import InputError
from trainfit.spec.objective import Policy
from trainfit.spec.recipe import Recipe

MARGIN = 0.02
"""Share of the memory that stays free by default. The worst predicted peak was off by 0.08 %, a compiled
model's by up to 1 % (evidence/pages/accuracy.md); other processes' contexts take some hundred MiB."""
TOKENS_OFF = 0.05
"""Share by which the tokens of a step may differ from those requested."""
GRID = (*range(1, 9), 10, 12, 14, *range(16, 33, 4), *range(40, 65, 8), *range(80, 129, 16))
GRID = (*GRID, *(2**n for n in range(8, 20)))
"""Numbers of sequences in a micro-batch that are ranked."""
MOST_MICRO = 2**16
"""Micro-batches below this number are all tried where nothing else varies."""
MIX = "mix"
"""Level of recomputation of a structure whose blocks differ, as planned within a budget."""


@dataclass(frozen=True)
class Goal:
    """Limits of a plan.

    Attributes:
        memory_bytes: of the device that may be used; None: all of it.
        host_bytes: pinned host memory of each GPU; None: as much as the GPU has.
        margin: share of the device's that stays free.
        tokens_per_step: of all GPUs; None: the recipe's micro-batches, of any size.
        keep_quality: exclude what changes the numerics.
        vary: fields that may vary; empty: every field.
        fixed: fields that may not.
    """

    memory_bytes: int | None = None
    host_bytes: int | None = None
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
"""Key of a combination: options, level of recomputation, micro-batch, micro-batches a step."""


class Traced(NamedTuple):
    """A candidate with its trace."""

    candidate: Candidate
    result: Result

    @property
    def rate(self) -> float:
        return self.result.estimate.tokens_per_s or 0.0 if self.result.estimate else 0.0

    @property
    def device_bytes(self) -> int:
        return self.result.estimate.highest.device if self.result.estimate else 0


class Combinations:
    """The combinations of one recipe's choices.

    Raises:
        InputError: the speed of the recipe's GPU is not known, or nothing is offered for a field to vary.
    """

    def __init__(self, recipe: Recipe, goal: Goal, estimates: Estimates):
        gpu = find_gpu(recipe.hardware.gpu)
        if gpu.memory_bytes_per_s is None or not gpu.peak_flops_per_s:
            remedy = "name a GPU of the catalog with --gpu"
            raise InputError("its speed is not known", remedy, field="hardware.gpu", value=gpu.name)
        self.recipe, self.goal, self.estimates, self.gpu = recipe, goal, estimates, gpu
        self.limit_bytes = min(goal.memory_bytes or gpu.usable_bytes, gpu.usable_bytes)
        self.usable_bytes = self.limit_bytes * (1 - goal.margin)
        self.host_bytes = gpu.memory_bytes if goal.host_bytes is None else goal.host_bytes
        self.space: Space = space(recipe, vary=goal.vary, fixed=goal.fixed, keep_quality=goal.keep_quality)
        self.traced: dict[Key, Traced] = {}
        self.exact: set[Key] = set()
        """Traced combinations whose estimate is exact, not shortened for ranking."""
        self._counts: dict[Option, tuple[bool, bool]] = {}
        most = max((count for _, count in self.batches(())), default=1)
        allowed = (one for one in self.space.options if most > 1 or self._fewest((one,)) == 1)
        self.space = self.space._replace(options=tuple(allowed))

    def recipe_of(
        self, options: Options, level: str, micro: int, accumulate: int, budget: float = 0
    ) -> Recipe:
        """Return the recipe of a combination.

        Raises:
            InputError: its values exclude each other.
        """
        values = agree(options)
        assert values is not None, "its options contradict each other"
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
        policy = self.recipe.objective if isinstance(self.recipe.objective, Policy) else None
        if policy is not None:
            # An update's completions are those of the rollout, whatever was requested.
            tokens = policy.completions // policy.updates_per_rollout * batch.seq
        off = 0.0 if policy is not None else TOKENS_OFF
        fewest = self._fewest(options)
        if not self.space.varies_batch:
            sequences = batch.micro * batch.accumulate * self.data_ranks(options)
            agrees = policy is None or of_update_alone(self.recipe) is not None
            is_allowed = batch.accumulate >= fewest and (agrees or sequences * batch.seq == tokens)
            return [(batch.micro, batch.accumulate)] if is_allowed else []
        grid = range(1, MOST_MICRO) if every else GRID
        if tokens is None:
            counts = [batch.accumulate] if batch.accumulate >= fewest else []
            return [(micro, count) for micro in grid if micro * batch.seq < 2**31 for count in counts]
        wanted = tokens / (batch.seq * self.recipe.objective.sequences * self.data_ranks(options))
        found = [(micro, max(1, round(wanted / micro))) for micro in grid if micro <= wanted * (1 + off)]
        most = 1 if any(map(self._is_for_whole_batches, options)) else max(GRID)
        return [
            (micro, count)
            for micro, count in found
            if fewest <= count <= most and abs(micro * count - wanted) <= off * wanted
        ]

    def _is_for_whole_batches(self, option: Option) -> bool:
        """Return whether an option is refused only where gradients are accumulated."""
        return self._refused_counts(option) == (False, True)

    def _fewest(self, options: Options) -> int:
        """Return the fewest micro-batches a step: two, where an option needs gradients to accumulate."""
        return 2 if any(self._refused_counts(one) == (True, False) for one in options) else 1

    def _refused_counts(self, option: Option) -> tuple[bool, bool]:
        """Return whether an option is refused with one micro-batch a step, and with two."""

        def is_refused(count: int) -> bool:
            try:
                changed(self.recipe, {**dict(option.values), "batch.accumulate": count})
            except InputError:
                return True
            return False

        if option not in self._counts:
            self._counts[option] = is_refused(1), is_refused(2)
        return self._counts[option]

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

    def trace(
        self,
        wanted: Sequence[Key],
        budget_gib: Callable[[Options], float] = lambda options: 0.0,
        ahead: Sequence[Key] = (),
    ) -> list[Traced | InputError]:
        """Trace combinations; one that cannot be built has a refusal in place of an estimate.

        Args:
            budget_gib: allocated bytes that blocks which differ in recomputation may reach.
            ahead: what is likely to be traced next, and is begun meanwhile.
        """
        found: list[Traced | InputError] = []
        requests: list[tuple[int, Candidate, Request]] = []
        for options, level, micro, accumulate in wanted:
            candidate = Candidate(0.0, 0.0, options, level, micro, accumulate)
            try:
                recipe = self.recipe_of(options, level, micro, accumulate, budget_gib(options))
                requests.append((len(found), candidate, Request(recipe, exact=False)))
                found.append(InputError("", ""))
            except InputError as error:
                found.append(error)
        next_ones: list[Request] = []
        for options, level, micro, accumulate in ahead:
            with suppress(InputError):
                recipe = self.recipe_of(options, level, micro, accumulate, budget_gib(options))
                next_ones.append(Request(recipe, exact=False))
        results = self.estimates.of([request for _, _, request in requests], next_ones)
        for (index, candidate, _), result in zip(requests, results, strict=True):
            if result.refused is not None:
                found[index] = result.refused
                continue
            one = found[index] = Traced(candidate, result)
            self.traced[candidate.key] = one
        return found

    def trace_exactly(self, several: Sequence[Traced]) -> None:
        """Put exact estimates in place of those for ranking."""
        new = [one for one in several if one.candidate.key not in self.exact]
        results = self.estimates.of([Request(one.result.recipe, exact=True) for one in new])
        for one, result in zip(new, results, strict=True):
            self.exact.add(one.candidate.key)
            if result.estimate is not None:
                self.traced[one.candidate.key] = one._replace(result=result)

    def fits(self, one: Traced) -> bool:
        """Return whether a traced recipe is within the limits, the margin kept."""
        estimate = one.result.estimate
        return estimate is not None and self.fits_but_for_host(one) and estimate.host_bytes <= self.host_bytes

    def fits_but_for_host(self, one: Traced) -> bool:
        """Return whether the device holds a traced recipe; pinned host memory is not considered."""
        estimate = one.result.estimate
        return estimate is not None and estimate.fits and estimate.highest.device <= self.usable_bytes
