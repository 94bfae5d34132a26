"""Plan: the recipes found for a goal, those that lost and why."""

import json
from typing import Any

from trainfit.spec.parsing.recipe_file import flat, recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate
from trainfit.spec.units import format_bytes
from trainfit.spec.value import Bytes, Count, Share, Value


class Found(Value):
    """A recipe with its prediction."""

    recipe: dict[str, Any]
    changes: tuple[str, ...]
    """Fields that differ from the given recipe, as a recipe writes them."""
    numerics: tuple[str, ...]
    """What of the mathematics differs from the given recipe; empty: nothing beyond rounding."""
    estimate: Estimate

    def as_recipe(self) -> Recipe:
        """Return the recipe."""
        return recipe_from(self.recipe)


class Rejection(Value):
    """A choice that the best recipe does not have."""

    choice: str
    reason: str


class Plan(Value):
    """The decision: ranked recipes, the frontier of memory against speed, and what was rejected."""

    given: dict[str, Any]
    """The recipe that was planned from."""
    limit_bytes: Bytes
    """Device memory that a recipe may take, before the margin."""
    host_limit_bytes: Bytes
    """Pinned host memory that a recipe may take for each GPU."""
    margin: Share
    """Share of the limit that stays free."""
    tokens_per_step: Count | None
    keep_quality: bool
    found: tuple[Found, ...]
    """Those that fit, the best first. Empty: nothing fits."""
    frontier: tuple[Found, ...]
    """Recipes of which none is both smaller and faster, by memory; also those over the limit."""
    largest: Found | None = None
    """Where only the batch varies: the largest micro-batch that fits."""
    accumulated: Found | None = None
    """If a step's tokens are free and its update takes long: the best, with more micro-batches."""
    least: Found | None = None
    """Where nothing fits: the recipe with the lowest memory."""
    rejected: tuple[Rejection, ...]
    num_ranked: Count
    """Combinations that were compared by the composed estimate."""
    num_traced: Count
    """Recipes that were traced."""
    run_tokens: float | None = None
    """Tokens of a whole training run, for its time and cost."""
    over_host: Found | None = None
    """Where nothing fits: the fastest recipe that the device holds and the host's limit alone forbids."""
    assumed: str = ""
    """Line on what was not given, such as the GPU, and is at its default."""
    notes: tuple[str, ...] = ()
    """What the search itself met, such as too little free memory for several processes."""

    @property
    def usable_bytes(self) -> int:
        """Device memory that a recipe may take."""
        return int(self.limit_bytes * (1 - self.margin))

    @property
    def best(self) -> Recipe:
        """The best recipe.

        Raises:
            ValueError: nothing fits.
        """
        if not self.found:
            if self.over_host is not None:
                pinned = format_bytes(self.over_host.estimate.host_bytes)
                raise ValueError(f"no recipe fits; .over_host would, with {pinned} of pinned host memory")
            raise ValueError("no recipe fits; .least is the smallest one found")
        return self.found[0].as_recipe()


class Advice(Value):
    """Ways to make a recipe fit that does not: changes of it, a larger GPU, more GPUs."""

    changes: tuple[Found, ...]
    """One change each, or two: those that keep the mathematics first, of these the fastest."""
    gpu: Found | None
    """The same recipe on a larger GPU: the smallest with a price and measured steps, else the smallest; None:
    none of the catalog holds it."""
    gpus: Found | None
    """The same recipe sharded by FSDP2 over the fewest GPUs, a power of two, found to hold it; where it takes
    that too, with full recomputation."""
    is_complete: bool = True
    """False: the time was over before everything had been tried."""


def changed_fields(before: Recipe, after: Recipe) -> tuple[str, ...]:
    """Return the fields of a recipe that differ from another's, as a recipe's lines."""
    old, new = (flat(one.model_dump(mode="json")) for one in (before, after))
    short = flat(
        {"quantize": {}} | after.model_dump(mode="json", include={"quantize"}, exclude_defaults=True)
    )
    found: dict[str, str] = {}
    for field, value in new.items():
        if field in old and old[field] == value:
            continue
        if field.startswith("quantize."):  # Its defaults are not written.
            base = {name.partition(".")[2]: one for name, one in short.items()}
            found["quantize"] = written("quantize", base)
        else:
            found[field] = written(field, value)
    return tuple(found.values())


def written(field: str, value: Any) -> str:
    """Return a field and its value as on a recipe's line."""
    return f"{field}: {value if isinstance(value, str) else json.dumps(value)}"
