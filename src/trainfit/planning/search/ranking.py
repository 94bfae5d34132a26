"""Rank all combinations of options, recomputation and batch by a composed estimate, before they are traced.

One structure (the start) is traced at several batches and levels of recomputation; each option is traced
once, added to it. An option's effect is taken as a sum, a batch's and a level's as a ratio. Only the ranking
rests on this: what is reported is traced.
"""

import itertools
import json
from collections.abc import Collection, Iterator, Sequence

from trainfit.planning.search.candidate import MIX, Candidate, Combinations, Key, Traced
from trainfit.planning.search.sizes import Batches, Sizes, sizes_of_traced, within
from trainfit.planning.search.space import Option, Options, agree
from trainfit.prediction.device_overhead import offload_bytes
from trainfit.spec.errors import InputError
from trainfit.spec.units import GIB

MAX_EXTRAS = 4
"""Options beyond the start that are combined."""
ALIKE = 0.5
"""Least share of their families of options beyond the start in which two structures that are alike agree."""
WRONG = 1.05
"""Least ratio of a trace's time or memory to the composed estimate's at which that was wrong."""


class Ranking:
    """What a search knows of the start and of each option, from which every combination is estimated."""

    def __init__(self, combinations: Combinations):
        self.combinations = combinations
        space = combinations.space
        self.start: Options = ()
        self.level = '"none"' if '"none"' in space.levels else next(iter(space.levels))
        self.at: tuple[int, int] = (1, 1)
        """Micro-batch, and micro-batches a step, at which options are compared."""
        self.grown = Batches({}, {})
        self.grown_with: dict[Option, Batches] = {}
        """Growth of the start with an option that changes the data-parallel ranks.

        Where those of the start wait for weights, a larger batch takes them no longer at first.
        """
        self.levels: dict[str, Sizes] = {}
        """Sizes of the start at each level of recomputation."""
        self.added: dict[Option, Sizes] = {}
        """Sizes of the start with each option, at the reference batch."""
        self.without: dict[Option, Sizes] = {}
        """Sizes of the start without each of its options, at the reference batch."""
        self.slow_levels: dict[Option, str] = {}
        """Level of recomputation at which each slow option was traced: others are not ranked with it."""
        self.dropped: dict[Option, frozenset[Option]] = {}
        """Options of the start that each one excludes."""
        self.rejected = {option: reason for option, reason in space.excluded}
        """Options that are not ranked, with the reason."""
        self.corrections: dict[tuple[Options, bool], tuple[float, float]] = {}
        self.num_ranked = 0

    def trace(self, wanted: Sequence[Key], ahead: Sequence[Key] = ()) -> list[Traced | InputError]:
        """Trace combinations, those whose blocks recompute differently within the memory left for them.

        Args:
            ahead: what is likely to be traced next, and is begun meanwhile.
        """
        return self.combinations.trace(wanted, self.budget_gib, ahead)

    def start_sizes(self, level: str) -> dict[int, Sizes]:
        """Return the sizes of the start at each traced micro-batch."""
        return {
            one.candidate.micro: sizes_of_traced(one)
            for (options, at, _, _), one in self.combinations.traced.items()
            if options == self.start and at == level
        }

    def growth(self, options: Options) -> Batches:
        """Return how a structure grows with the micro-batch."""
        own = (self.grown_with[option] for option in options if option in self.grown_with)
        return next(own, self.grown)

    def moved(self, one: Traced) -> Sizes:
        """Return a traced recipe's sizes at the reference batch."""
        own = (self.grown_with[each] for each in one.candidate.options if each in self.grown_with)
        grown = next(own, None) or Batches.of(self.start_sizes(self.level))
        return grown.moved(sizes_of_traced(one), one.candidate.micro, self.at[0])

    def level_of(self, option: Option) -> str:
        """Return the level of recomputation at which an option is compared."""
        forced = dict(option.values).get("recompute")
        return self.level if forced is None else json.dumps(forced)

    def budget_gib(self, options: Options) -> float:
        """Return the allocated bytes, in GiB, that leave room for what the device holds too."""
        other = self.sizes(options, self.level).other_bytes if self.levels else 0.0
        usable_bytes = self.combinations.usable_bytes
        # These blocks may offload, at most about as much as the card holds.
        other = 1.05 * other + offload_bytes(self.combinations.gpu, usable_bytes)
        return max(0.01, round((usable_bytes - other) / GIB - 0.005, 2))

    def ordered(self, options: Collection[Option]) -> Options:
        """Return options in the space's order."""
        return tuple(one for one in self.combinations.space.options if one in options)

    def sizes(self, options: Options, level: str) -> Sizes:
        """Return the composed sizes of a structure at the reference batch."""
        start = self.levels[self.level]
        base = self.levels.get(level, start)
        found = start
        added = [option for option in options if option in self.added]
        for option in sorted(added, key=lambda one: self.more_ranks(one) != 1):
            before = self.levels.get(self.level_of(option), start)
            # Ranks that share a sequence also divide the gain of the other options.
            combine = found.plus if self.more_ranks(option) == 1 else found.times
            found = combine(self.added[option], before)
        ratio = base.batch_bytes / max(start.batch_bytes, 1.0)
        return found._replace(
            batch_bytes=found.batch_bytes * ratio,
            micro_s=max(1e-9, found.micro_s + base.micro_s - start.micro_s),
            host_s=max(0.0, found.host_s + base.host_s - start.host_s),
        )

    def structures(self) -> Iterator[Options]:
        """Yield the start, and the start with each combination of options that make it smaller or faster."""
        extras = [option for option in self.added if self._is_useful(option)]
        for count in range(min(MAX_EXTRAS, len(extras)) + 1):
            for some in itertools.combinations(extras, count):
                fields = [field for one in some for field, _ in one.values]
                if len({one.family for one in some}) < count or len(set(fields)) < len(fields):
                    continue  # Two options that set one field would count its effect twice.
                without = frozenset[Option]().union(*(self.dropped[one] for one in some))
                structure = self.ordered([*(one for one in self.start if one not in without), *some])
                if agree(structure) is not None:
                    yield structure

    def _is_useful(self, option: Option) -> bool:
        """Return whether an option makes the start smaller or faster."""
        before, after = self.levels.get(self.level_of(option), self.levels[self.level]), self.added[option]
        ranks = self.more_ranks(option)
        smaller = after.device_bytes < before.device_bytes or after.fixed_bytes < before.fixed_bytes
        return smaller or after.step_s(1) / ranks < before.step_s(1)

    def more_ranks(self, option: Option) -> float:
        """Return the data-parallel ranks with an option over those of the start."""
        return self.combinations.data_ranks((option,)) / self.combinations.data_ranks(self.start)

    def ranked(self, limit: float = 1.0) -> list[Candidate]:
        """Return every combination within the limit by the composed estimate, the fastest first.

        Args:
            limit: multiple of the bytes that may be used.
        """
        most = limit * self.combinations.usable_bytes
        found: list[Candidate] = []
        self.num_ranked = 0
        for options in self.structures():
            forced = {level for level in map(self.level_of, options) if level != self.level}
            forced |= {self.slow_levels[one] for one in options if one in self.slow_levels}
            if len(forced) > 1:
                continue
            levels = forced or [one for one in self.combinations.space.levels if one in self.levels]
            sizes = {level: self.sizes(options, level) for level in levels}
            tokens = self.combinations.recipe.batch.seq * self.combinations.data_ranks(options)
            grown = self.growth(options)
            for micro, count in self.combinations.batches(options):
                moved = {level: grown.moved(one, self.at[0], micro) for level, one in sizes.items()}
                self.num_ranked += len(moved)
                found += self._fitting(options, moved, micro, count, tokens, most)
                if all(one.device_bytes > 2 * most for one in moved.values()):
                    break
        return sorted(found, reverse=True, key=lambda one: (one.rate, -one.device_bytes))

    def _fitting(
        self, options: Options, moved: dict[str, Sizes], micro: int, count: int, tokens: int, most: float
    ) -> Iterator[Candidate]:
        """Yield the candidates of one structure and batch that take at most ``most`` bytes."""
        for level, sizes in moved.items():
            size_off, time_off = self._off(options, mixed=False)
            if sizes.device_bytes * size_off <= most:
                rate = micro * count * tokens / (sizes.step_s(count) * time_off)
                yield Candidate(rate, sizes.device_bytes * size_off, options, level, micro, count)
        if self.combinations.space.solves_recompute and len(moved) > 1 and self._can_mix(options):
            size_off, time_off = self._off(options, mixed=True)
            mix = within(tuple(moved.values()), self.combinations.usable_bytes / size_off)
            if mix is not None and all(mix is not one for one in moved.values()):
                rate = micro * count * tokens / (mix.step_s(count) * time_off)
                yield Candidate(rate, self.combinations.usable_bytes, options, MIX, micro, count)

    def _off(self, options: Options, *, mixed: bool) -> tuple[float, float]:
        """Return the corrections of memory and time; a mix has those of like blocks until it has its own."""
        of_like_blocks = self.corrections.get((options, False), (1.0, 1.0))
        return self.corrections.get((options, True), of_like_blocks) if mixed else of_like_blocks

    def _can_mix(self, options: Options) -> bool:
        """Return whether blocks may recompute differently in a structure."""
        values = agree(options) or {}
        return values.get("parallel.tensor", self.combinations.recipe.parallel.tensor) == 1

    def alike(self, some: Options, others: Options) -> bool:
        """Return whether two structures differ from the start in nearly the same."""
        a, b = set(some) ^ set(self.start), set(others) ^ set(self.start)
        families, same = ({one.family for one in each} for each in (a | b, a & b))
        return len(same) >= ALIKE * max(1, len(families))

    def is_like_wrong(self, options: Options, *, mixed: bool) -> bool:
        """Return whether a structure is like one whose composed estimate its trace showed to be wrong.

        Its own estimate is likely to be wrong for the same reason. What differs in an attention kernel alone
        would otherwise be traced again and again, and other structures never.
        """
        wrong = (
            others
            for (others, is_mix), off in self.corrections.items()
            if is_mix == mixed and max(off) >= WRONG
        )
        return any(self.alike(options, others) for others in wrong)

    def correct(self, candidate: Candidate, one: Traced | InputError) -> None:
        """Correct the composed estimate of a structure by its trace; drop a refused one from the ranking."""
        key = candidate.options, candidate.level == MIX
        size_off, time_off = self._off(candidate.options, mixed=candidate.level == MIX)
        if isinstance(one, InputError):
            self.corrections[key] = (1e6, 1e6) if candidate.level != MIX else (size_off * 1.05, time_off)
            return
        size_off *= one.device_bytes / max(candidate.device_bytes, 1.0)
        self.corrections[key] = size_off, time_off * candidate.rate / max(one.rate, 1e-9)
