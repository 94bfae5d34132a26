"""Search for the fastest recipe within a memory limit: a few traces, a ranking by the composed estimate, then
exact traces of those that rank highest.

1. The start is the recipe with every option that usually costs nothing.
2. It is traced at several micro-batches and levels of recomputation, and with each further option added.
3. All combinations are ranked by the composed estimate (ranking.py).
4. The highest are traced. Each trace corrects the estimate of its structure, until none left ranks higher.
5. Options without which the best recipe is as fast are left out of it.
6. Much faster recipes that, by the composed estimate, are hardly over the limit are traced: it may be off.
7. Options that are slow to trace (compilation) are added to the best recipe, or to what it would be without
   recomputation, and ranked with the others; the best is traced with the largest batch that fits, too.
8. Recipes whose blocks recompute differently are traced last, if they still rank highest: a budget takes as
   long as ten other traces.
9. The best is traced without each option that it may only have for a larger batch, whose gain is small.
10. The best with larger batches, and what is faster with smaller ones, are traced where their own traces say
    that these fit (neighbours.py).
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from trainfit.planning.estimates import Estimates
from trainfit.planning.search.candidate import MIX, Candidate, Combinations, Goal, Key, Traced
from trainfit.planning.search.neighbours import larger_than_best, smaller_than_faster
from trainfit.planning.search.plan import (
    TIE,
    assembled,
    best_of,
    discounted,
    fastest,
    frontier,
    simpler,
    without_each,
)
from trainfit.planning.search.ranking import Batches, Ranking, sizes_of_traced
from trainfit.planning.search.space import OWN_FAMILY, Option, Options, agree, changed
from trainfit.rl.shares import check_counts
from trainfit.spec.errors import InputError
from trainfit.spec.objective import Policy
from trainfit.spec.plan import Plan, written
from trainfit.spec.recipe import Recipe
from trainfit.spec.units import format_bytes

SLOW_ROUNDS = 3
"""Most rounds of traces after slow options were added."""
WORTH_TRACING = 0.003
"""Least estimated gain, as a share, over the fastest traced recipe for which another one is traced."""
SLOW_GAIN = 0.1
"""Least share of a step outside matrix products and the update for which slow options are traced."""
ACTIVATIONS_TOKENS = 8192
"""Tokens of a micro-batch from which activations, rather than whole gradients, usually set the peak."""
GROWTH = 4
"""Least ratio of the two micro-batches at which options are traced that change the data-parallel ranks."""
MAX_ROUNDS = 4
NUM_TRACED = 2
"""Most recipes that are traced in a round."""
NUM_NEIGHBOURS = 4
"""Most that are traced in a round because they differ from traced ones in the batch alone."""
ALMOST = 1.5
"""Where nothing fits: multiple of the limit above which, by the composed estimate, nothing is traced."""
NEARLY = 1.3
"""Multiple of the limit below which, by the composed estimate, a recipe may fit once compiled."""
BARELY, BARELY_GAIN = 1.02, 0.02
"""Multiple of the limit below which, by the composed estimate, a recipe may fit after all, and the least
estimated gain for which that is tried."""
COMPARABLE = 0.9
"""Least speed, as a share of the best's, of a recipe that is compiled in its place."""


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
        self.combinations = Combinations(recipe, goal, estimates)
        self.ranking = Ranking(self.combinations)
        self.recipe, self.say = recipe, say
        self.space, self.usable_bytes = self.combinations.space, self.combinations.usable_bytes
        self.rejected = {option: reason for option, reason in self.space.excluded}
        self.largest: Traced | None = None

    @property
    def traced(self) -> list[Traced]:
        """Everything traced so far."""
        return list(self.combinations.traced.values())

    def run(self) -> Plan:
        """Search, and return the plan."""
        self.say("tracing the starting recipe")
        self._find_start()
        if not self.space.options and len(self.space.levels) == 1 and not self.space.solves_recompute:
            self.say("tracing batches")
            self._find_largest()
            return self._assembled()
        self._find_batch()
        self._enlarge_batch()
        self.say("tracing its options")
        self._add_options()
        self.say("tracing the recipes that rank highest")
        self._trace_highest(WORTH_TRACING)
        self._trace_highest(BARELY_GAIN, rounds=1, limit=BARELY)
        if self._add_slow():
            self._trace_largest_like_best()
            self._trace_highest(TIE, rounds=SLOW_ROUNDS)
            self._trace_highest(BARELY_GAIN, rounds=1, limit=BARELY)
        if self._trace_highest(WORTH_TRACING, mixed=True):
            best = best_of(self.combinations)
            self._trace([simpler(self.ranking, best.candidate.key)] if best else [])
        self._trace(without_each(self.ranking, best_of(self.combinations)))
        self._trace_neighbours()
        if best_of(self.combinations) is None and self._find_smallest():
            self._trace_highest(WORTH_TRACING)
            self._trace_neighbours()
            self._trace(frontier(self.ranking))
        return self._assembled()

    def _assembled(self) -> Plan:
        """Return the plan, its recipes traced exactly.

        An exact trace may take more memory: if the best does not fit, others are traced in its place.
        """
        known = self.combinations.traced
        for _ in range(MAX_ROUNDS):
            best = best_of(self.combinations)
            if best is None or best.candidate.key in self.combinations.exact:
                break
            self.combinations.trace_exactly(fastest(self.combinations, best))
            is_ranked = bool(self.ranking.grown.micro_s)  # Not where only the batch varies.
            if is_ranked and not self.combinations.fits(exact := known[best.candidate.key]):
                ranked = best.candidate._replace(rate=best.rate, device_bytes=best.device_bytes)
                self.ranking.correct(ranked, exact)
                self._trace_highest(WORTH_TRACING)
                self._trace_neighbours()
        best, largest = best_of(self.combinations), self.largest
        if best is not None and largest is not None and best.candidate.micro > largest.candidate.micro:
            largest = best  # Traced later: where few micro-batches are allowed, the rounds may miss it.
        return assembled(self.ranking, best, self.rejected, largest)

    def _trace(self, wanted: Sequence[Key], ahead: Sequence[Key] = ()) -> list[Traced | InputError]:
        return self.combinations.trace(wanted, self.ranking.budget_gib, ahead)

    # Traces

    def _find_start(self) -> None:
        """Take every option that usually costs nothing, and drop those that the recipe refuses."""
        for option in self.space.options:
            if option.is_slow:  # These are traced last; start the processes now, as their imports take time.
                with suppress(InputError):
                    self.combinations.estimates.later.append(changed(self.recipe, dict(option.values)))
        chosen: list[Option] = []
        for option in self.space.options:
            if option.is_start and option.family not in {one.family for one in chosen}:
                chosen.append(option)
        while True:
            self.ranking.start = tuple(chosen)
            batches = self.combinations.batches(self.ranking.start)
            if not batches:
                raise self._no_batch()
            first = _spread(batches, ACTIVATIONS_TOKENS / self.recipe.batch.seq)
            found = self._trace([(self.ranking.start, self.ranking.level, *each) for each in first])
            refused = next((one for one in found if isinstance(one, InputError)), None)
            if refused is None:
                return self._trace_larger_starts(batches)
            if not chosen:
                raise refused
            option = _named_in(refused, chosen) or chosen[-1]
            self.rejected[option] = refused.problem
            chosen.remove(option)

    def _trace_larger_starts(self, batches: Sequence[tuple[int, int]]) -> None:
        """Trace larger batches until two traces show how memory grows."""
        for _ in range(MAX_ROUNDS):
            known = self.ranking.start_sizes(self.ranking.level)
            largest = max(known)
            if sum(one.grows_with_batch for one in known.values()) > 1 or largest == batches[-1][0]:
                break
            wanted = _spread([each for each in batches if each[0] > largest], 2 * largest)[-2:]
            self._trace([(self.ranking.start, self.ranking.level, *each) for each in wanted])

    def _no_batch(self) -> InputError:
        ranks, seq = self.combinations.data_ranks(self.ranking.start), self.recipe.batch.seq
        if isinstance(self.recipe.objective, Policy):
            if not self.space.varies_batch:
                check_counts(self.recipe)
            count = self.recipe.objective.completions
            problem = (
                f"a rollout's {count} completions do not divide into updates on {ranks} data-parallel ranks"
            )
            return InputError(
                problem, "use others", field="objective.prompts", value=self.recipe.objective.prompts
            )
        problem = f"is no multiple of {ranks} data-parallel ranks x {seq} tokens a sequence"
        remedy, value = f"request a multiple of {ranks * seq}", self.combinations.goal.tokens_per_step
        return InputError(problem, remedy, field="tokens_per_step", value=value)

    def _find_batch(self) -> None:
        """Choose the micro-batch at which options are compared: the smallest that is as fast as any.

        If the start fits with none, one of many tokens: with few, options that save activations save nothing.
        """
        known = self.ranking.start_sizes(self.ranking.level)
        grown = Batches.of(known)
        first = min(known)
        rates: dict[tuple[int, int], float] = {}
        batches = self.combinations.batches(self.ranking.start)
        for micro, count in batches:
            sizes = grown.moved(known[first], first, micro)
            if sizes.device_bytes <= self.usable_bytes:
                rates[micro, count] = micro * count / sizes.step_s(count)
        if rates:
            most = max(rates.values())
            self.ranking.at = next(each for each, rate in rates.items() if rate >= (1 - TIE) * most)
        else:
            many = ACTIVATIONS_TOKENS / self.recipe.batch.seq
            self.ranking.at = next((each for each in batches if each[0] >= many), batches[-1])

    def _enlarge_batch(self) -> None:
        """Compare options at a batch whose peak is activations: only there levels of recomputation differ."""
        least = min(Batches.of(self.ranking.start_sizes(self.ranking.level)).batch_bytes)
        at, allowed = self.ranking.at, self.combinations.batches(self.ranking.start)
        self.ranking.at = next((each for each in allowed if each[0] >= max(least, at[0])), at)

    def _find_largest(self) -> None:
        """Trace micro-batches until the largest that fits and the next one, which does not, are known."""
        allowed = self.combinations.batches(self.ranking.start, every=True)
        for _ in range(MAX_ROUNDS):
            known = {one.candidate.micro: self.combinations.fits(one) for one in self.traced}
            low = max((micro for micro, fits in known.items() if fits), default=0)
            high = min((micro for micro, fits in known.items() if not fits), default=allowed[-1][0] + 1)
            between = [each for each in allowed if low < each[0] < high]
            if not between:
                self.combinations.trace_exactly([one for one in self.traced if one.candidate.micro == low])
                if all(self.combinations.fits(one) for one in self.traced if one.candidate.micro == low):
                    break
                continue
            sizes = self.ranking.start_sizes(self.ranking.level)
            nearest = min(sizes, key=lambda micro: abs(micro - high))
            grown = Batches.of(sizes)
            fitting = [
                index
                for index, (micro, _) in enumerate(between)
                if grown.moved(sizes[nearest], nearest, micro).device_bytes <= self.usable_bytes
            ]
            last = fitting[-1] if fitting else 0
            self._trace(
                [(self.ranking.start, self.ranking.level, *each) for each in between[max(0, last) : last + 2]]
            )
        fits = [one for one in self.traced if self.combinations.fits(one)]
        self.largest = max(fits, key=lambda one: one.candidate.micro, default=None)
        if self.largest is not None:
            self._find_batch()
            self._trace([(self.ranking.start, self.ranking.level, *self.ranking.at)])
        self.ranking.levels = {
            self.ranking.level: next(iter(self.ranking.start_sizes(self.ranking.level).values()))
        }

    def _add_options(self) -> None:
        """Trace the start at each level, without each of its options, and with each other one."""
        reference = next(one for one in self.traced if one.candidate.options == self.ranking.start)
        extras: list[Option] = []
        levels = [(self.ranking.start, level, *self.ranking.at) for level in self.space.levels]
        removable = [option for option in self.ranking.start if option.family != OWN_FAMILY]
        without = [
            (self.ranking.ordered(set(self.ranking.start) - {one}), self.ranking.level, *self.ranking.at)
            for one in removable
        ]
        added: list[Key] = []
        slow: list[Options] = []
        for option in self.space.options:
            if option in self.ranking.start or option in self.rejected:
                continue
            reason = self._not_worth(option, reference)
            structure = self._with(option, self.ranking.start) if reason is None else None
            if structure is None:
                self.rejected.setdefault(option, reason or "cannot be combined with the starting recipe")
            elif option.is_slow:
                slow.append(structure)
            else:
                extras.append(option)
                added.append((structure, self.ranking.level_of(option), *self._batch_for(structure)))
        found = iter(self._trace([*levels, *without]))
        for level, one in zip(self.space.levels, found, strict=False):
            if isinstance(one, Traced):
                self.ranking.levels[level] = sizes_of_traced(one)
        if self.ranking.level not in self.ranking.levels:
            self.ranking.level = next(iter(self.ranking.levels))
        for option, one in zip(removable, found, strict=False):
            if isinstance(one, Traced):
                self.ranking.without[option] = sizes_of_traced(one)
        best = best_of(self.combinations)
        ahead: list[Key] = []
        if (
            best is not None
            and best.candidate.level == self.ranking.level
            and self.combinations.fits(reference)
        ):
            # The start is likely to stay the best.
            at = simpler(self.ranking, best.candidate.key)
            needless = set(self.ranking.start) - set(at[0])
            ahead = [self._larger((self.ranking.ordered(set(one) - needless), *at[1:])) for one in slow]
        several = self._trace(added, ahead)
        self._find_growth(extras, several)
        for option, one in zip(extras, several, strict=True):
            if isinstance(one, InputError):
                self.rejected[option] = one.problem
            elif (pinned := self._too_much_pinned(one)) is not None:
                self.rejected[option] = pinned
            else:
                self.ranking.added[option] = self.ranking.moved(one)
        self.ranking.grown = Batches.of(self.ranking.start_sizes(self.ranking.level))

    def _find_growth(self, options: Sequence[Option], traced: Sequence[Traced | InputError]) -> None:
        """Trace options that change the data-parallel ranks at a second micro-batch."""
        pairs: list[tuple[Option, Traced]] = []
        wanted: list[Key] = []
        for option, one in zip(options, traced, strict=True):
            if isinstance(one, InputError) or self.ranking.more_ranks(option) == 1:
                continue
            structure, level, micro, _ = one.candidate.key
            others = [each for each in self.combinations.batches(structure) if each[0] >= GROWTH * micro]
            if others:
                pairs.append((option, one))
                wanted.append((structure, level, *others[0]))
        for (option, one), larger in zip(pairs, self._trace(wanted), strict=True):
            if isinstance(larger, Traced):
                sizes = {each.candidate.micro: sizes_of_traced(each) for each in (one, larger)}
                self.ranking.grown_with[option] = Batches.of(sizes)

    def _too_much_pinned(self, one: Traced) -> str | None:
        """Return why a recipe takes more of the host's memory than it may; None: it does not."""
        estimate, limit_bytes = one.result.estimate, self.combinations.host_bytes
        if estimate is None or estimate.host_bytes <= limit_bytes:
            return None
        limit = f"of at most {format_bytes(limit_bytes)} (--host-memory-gib)"
        return f"pins {format_bytes(estimate.host_bytes)} of the host's memory for each GPU, {limit}"

    def _add_slow(self) -> bool:
        """Trace the best recipe, or the smallest, with each slow option; return whether there are any.

        If the best recomputes, what nearly fits without is compiled in its place: compiled blocks keep less,
        and lose more by recomputation. If then nothing compiled fits, the best itself is compiled.
        """
        slow = [one for one in self.space.options if one.is_slow and one not in self.rejected]
        best = best_of(self.combinations)
        if best is None:
            at = min(self.traced, key=lambda one: one.device_bytes).candidate.key
            return self._compile(slow, at)
        other = self._not_recomputed(best)
        compiled = other is not None and self._compile(slow, other)
        ranked = {option for one in self.ranking.ranked() for option in one.options} if compiled else set()
        rest = [one for one in slow if one not in ranked and one not in self.rejected]
        return self._compile(rest, simpler(self.ranking, best.candidate.key)) or compiled

    def _compile(self, slow: Sequence[Option], at: Key) -> bool:
        """Trace a combination with each slow option; return whether there are any.

        The combination itself and the frontier are traced meanwhile: they take less time.
        """
        structures = [(one, self._with(one, at[0])) for one in slow]
        wanted = [(one, self._larger((some, *at[1:]))) for one, some in structures if some]
        if wanted:
            fields = dict.fromkeys(written(*each) for one, _ in wanted for each in one.values)
            self.say(f"tracing {', '.join(fields)}")
        # The next traces, of blocks that differ, rarely depend on these, and fill the other processes.
        mixed = [one.key for one in self._highest(WORTH_TRACING, set(), mixed=True)[0]] if wanted else []
        keys = [*(key for _, key in wanted), at, *frontier(self.ranking)]
        has_idle = len(wanted) < self.combinations.estimates.processes
        ahead = [*mixed, *(simpler(self.ranking, one) for one in mixed)] if has_idle else mixed
        traced = self._trace(keys, ahead)
        start, base = self.ranking.levels[self.ranking.level], self.combinations.traced.get(at)
        without = self.ranking.moved(base) if base else self.ranking.sizes(*at[:2])
        for (option, _), found in zip(wanted, traced, strict=False):
            if isinstance(found, InputError):
                self.rejected[option] = found.problem
            else:
                self.ranking.slow_levels[option] = at[1]
                self.ranking.added[option] = start.plus(self.ranking.moved(found), without)
        return bool(wanted)

    def _not_recomputed(self, best: Traced) -> Key | None:
        """Return what ranks highest without recomputation.

        None: the best recomputes nothing, or what does not is much slower or much too large.
        """
        if best.candidate.level in (self.ranking.level, MIX):
            return None
        alike = [one for one in self.ranking.ranked(limit=NEARLY) if one.level == self.ranking.level]
        highest = max(alike, key=lambda one: discounted(one.rate, one.options), default=None)
        if highest is None or highest.rate < best.rate * COMPARABLE:
            return None
        with suppress(InputError):
            self.combinations.recipe_of(*highest.key)
            return simpler(self.ranking, highest.key)
        return None

    def _larger(self, key: Key) -> Key:
        """Return a combination with up to twice its micro-batch, as far as it would fit if it were not slow.

        A faster structure gains more where samples share what is done once: the update, casts of weights.
        """
        options, level, at, _ = key
        sizes = self.ranking.sizes(options, level)
        own = self.ranking.growth(options)
        grown = own if own.micro_s else Batches.of(self.ranking.start_sizes(self.ranking.level))
        larger = [
            (options, level, *each)
            for each in self.combinations.batches(options)
            if at < each[0] <= 2 * at
            and grown.moved(sizes, self.ranking.at[0], each[0]).device_bytes <= self.usable_bytes
        ]
        return larger[-1] if larger else key

    def _trace_largest_like_best(self) -> None:
        """Trace the best with the largest micro-batch that fits, if it is slow and that is twice as large.

        The start does not show what only a slow option does once for all samples, such as casts to fp8.
        """
        best = best_of(self.combinations)
        if best is None or not any(option.is_slow for option in best.candidate.options):
            return
        options, level, micro, _ = best.candidate.key
        alike = [one for one in self.ranking.ranked() if (one.options, one.level) == (options, level)]
        larger = [one for one in alike if one.micro >= 2 * micro and one.rate > best.rate]
        if larger:
            largest = max(larger, key=lambda one: one.micro)
            self.ranking.correct(largest, self._trace([largest.key])[0])

    def _trace_neighbours(self) -> None:
        """Trace what was traced with other batches, as far as its own trace says that they fit."""
        tried = set[Key]()
        for _ in range(MAX_ROUNDS):
            found = (*larger_than_best(self.ranking), *smaller_than_faster(self.ranking))
            wanted = [key for key in dict.fromkeys(found) if key not in tried][:NUM_NEIGHBOURS]
            if not wanted:
                break
            tried.update(wanted)  # A refused one is not among the traced.
            self._trace(wanted)

    def _batch_for(self, structure: Options) -> tuple[int, int]:
        """Return the batch nearest to the reference that a structure may have."""
        allowed = self.combinations.batches(structure)
        return min(allowed, key=lambda each: abs(each[0] - self.ranking.at[0]), default=self.ranking.at)

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
        if option.is_long and not option.is_slow and self.combinations.fits(reference):
            more = (set(one.values) for one in self.space.options if one.family == option.family)
            if any(set(option.values) < values for values in more):
                return "saves memory, but everything fits already"
        needs_bytes = option.least_bytes(estimate.params, estimate.trainable_params)
        if needs_bytes > self.usable_bytes:
            return f"keeps {format_bytes(needs_bytes)} of weights and gradients on every GPU"
        return None

    def _with(self, option: Option, options: Options) -> Options | None:
        """Return a structure with an option, without those that it excludes; None: it is refused."""
        kept = [one for one in options if one.family != option.family and agree((one, option)) is not None]
        while True:
            structure = self.ranking.ordered([*kept, option])
            try:
                self.combinations.recipe_of(
                    structure, self.ranking.level_of(option), *self._batch_for(structure)
                )
            except InputError as error:
                named = _named_in(error, kept)
                if named is None:
                    self.rejected[option] = error.problem
                    return None
                kept.remove(named)
                continue
            self.ranking.dropped[option] = frozenset(self.ranking.start) - frozenset(kept)
            return structure

    def _trace_highest(
        self, worth: float, rounds: int = MAX_ROUNDS, *, mixed: bool = False, limit: float = 1.0
    ) -> bool:
        """Trace what ranks highest until nothing left ranks that share above the fastest traced recipe.

        Args:
            mixed: trace recipes whose blocks differ in recomputation, else those whose blocks do not.
            limit: multiple of the bytes that may be used, for the composed estimate.

        Returns:
            Whether there were any.
        """
        tried: set[Key] = set()
        for _ in range(rounds):
            chosen, refused = self._highest(worth, tried, mixed=mixed, limit=limit)
            for candidate, error in refused:
                self.ranking.correct(candidate, error)
            if not chosen:
                break
            tried.update(one.key for one in chosen)
            for candidate, one in zip(chosen, self._trace([one.key for one in chosen]), strict=True):
                self.ranking.correct(candidate, one)
        return bool(tried)

    def _highest(
        self, worth: float, tried: Collection[Key], *, mixed: bool, limit: float = 1.0
    ) -> tuple[list[Candidate], list[tuple[Candidate, InputError]]]:
        """Return the highest-ranked combinations that are not traced, for one round, and the refused ones.

        Those that are like another of the round, or like what was ranked wrongly, come after all others.
        """
        fitting = [one for one in self.traced if self.combinations.fits(one)]
        best = max((discounted(one.rate, one.candidate.options) for one in fitting), default=0.0)
        chosen: list[Candidate] = []
        similar: list[Candidate] = []
        refused: list[tuple[Candidate, InputError]] = []
        for one in sorted(self.ranking.ranked(limit), key=lambda one: -discounted(one.rate, one.options)):
            if discounted(one.rate, one.options) < best * (1 + worth) or len(chosen) >= NUM_TRACED:
                break
            if (one.level == MIX) != mixed or (mixed and any(option.is_slow for option in one.options)):
                continue  # Blocks that differ are compiled in each way that they may recompute: 20 s.
            new = one.key not in tried and one.key not in self.combinations.traced
            if not new or one.key[:2] in {each.key[:2] for each in (*chosen, *similar)}:
                continue
            is_similar = self.ranking.is_like_wrong(one.options, mixed=mixed) or any(
                self.ranking.alike(one.options, each.options) for each in chosen
            )
            if is_similar and len(similar) == NUM_TRACED:
                continue
            try:
                self.combinations.recipe_of(*one.key, budget=1.0)
                (similar if is_similar else chosen).append(one)
            except InputError as error:
                refused.append((one, error))
        return [*chosen, *similar][:NUM_TRACED], refused

    def _find_smallest(self) -> bool:
        """Trace what is smallest by the composed estimate, until one fits; return whether one does.

        The composed estimate adds what each option saves alone, which may be less than they save together.
        """
        for _ in range(MAX_ROUNDS):
            ranked = self.ranking.ranked(limit=ALMOST)
            known = self.combinations.traced
            new = sorted((one for one in ranked if one.key not in known), key=_bytes)[:NUM_TRACED]
            for candidate, one in zip(new, self._trace([one.key for one in new]), strict=True):
                self.ranking.correct(candidate, one)
            if not new or best_of(self.combinations) is not None:
                break
        return best_of(self.combinations) is not None


def _spread(batches: Sequence[tuple[int, int]], least: float) -> list[tuple[int, int]]:
    """Return the first batch, the first with at least ``least`` samples, and the first with twice as many."""
    found = [batches[0]]
    for wanted in (least, 2 * max(least, batches[0][0])):
        found.append(next((each for each in batches if each[0] >= wanted), batches[-1]))
    return list(dict.fromkeys(found))


def _bytes(one: Candidate) -> float:
    return one.device_bytes


def _named_in(error: InputError, options: Sequence[Option]) -> Option | None:
    """Return the option with the field that a refusal names, else one of the same section."""
    named = error.field or ""
    for prefix in filter(None, (f"{named}.".lstrip("."), named.partition(".")[0])):
        for option in options:
            if any(f"{field}.".startswith(prefix) for field, _ in option.values):
                return option
    return None
