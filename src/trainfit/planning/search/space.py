"""The space of plans: values that techniques offer in place of a recipe's own, and which of them may vary."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainfit.planning.attention import fastest_kernels
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from, set_field
from trainfit.spec.plan import written
from trainfit.spec.recipe import Recipe
from trainfit.techniques import registry
from trainfit.techniques.base import AS_BEFORE, Expected, Offer

BATCH = ("batch.micro", "batch.accumulate")
RECOMPUTE, MICRO_BATCH = "recompute", "batch"
"""Families of options that stand for a level of recomputation and for a micro-batch."""
WHOLE = (RECOMPUTE, "quantize")
"""Fields whose value may be a mapping, which is set as a whole."""
OWN_FAMILY = "model"
OWN = (Offer({"model": {"implementation": "native"}}, is_start=True),)
"""Choices of recipe fields that no technique offers."""
KERNELS = 2
"""Most attention kernels that are tried, the fastest measured first."""


class Option(NamedTuple):
    """Values of a recipe's fields that the planner may choose together; most are an offer of a technique."""

    family: str
    """Name of the technique that offers it; of each family at most one option is chosen."""
    values: tuple[tuple[str, Any], ...]
    """Dotted fields and their values."""
    expected: Expected = AS_BEFORE
    """Memory and time with it, over those of the recipe without it."""
    kept_bytes: tuple[float, float] = (0.0, 0.0)
    numerics: str = ""
    is_start: bool = False
    is_slow: bool = False
    speeds_up: str = "all"

    @property
    def is_long(self) -> bool:
        """Whether its traces take several times as long as others: compiled, or with offloaded weights."""
        return self.is_slow or ("offload.weights", True) in self.values

    def least_bytes(self, params: int, trainable_params: int) -> float:
        """Return the least bytes of weights and gradients that it keeps on every GPU."""
        of_each, of_trained = self.kept_bytes
        return params * of_each + trainable_params * of_trained

    @property
    def label(self) -> str:
        """The fields as a recipe writes them: ``loss: fused``."""
        return ", ".join(written(field, value) for field, value in self.values)


Options = tuple[Option, ...]
"""Options chosen together, in the order of the space."""


class Space(NamedTuple):
    """Options of a search, and those left out with the reason."""

    options: Options
    levels: dict[str, Option]
    """Values of ``recompute`` that may be tried, by their JSON, the recipe's own first."""
    solves_recompute: bool
    """A budget may decide what each block recomputes."""
    varies_batch: bool
    excluded: tuple[tuple[Option, str], ...]
    """Options with the reason why they are not tried."""


class _Dict(dict[str, Any]):
    """A field's value that is a mapping, hashable as options are keys."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(json.dumps(self, sort_keys=True))


class _List(list[Any]):
    """A field's value that is a list, likewise."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(json.dumps(self, sort_keys=True))


def leaves(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted field of nested ``fields`` with its value; those in ``WHOLE`` are one value."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and f"{prefix}{name}" not in WHOLE:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            hashable = {dict: _Dict, list: _List}.get(type(value))
            yield f"{prefix}{name}", hashable(value) if hashable else value


def value_in(recipe: Recipe, field: str) -> Any:
    """Return a recipe's value of a dotted field as plain data.

    Raises:
        InputError: recipes have no such field.
    """
    value: Any = recipe.model_dump(mode="json")
    for part in field.split("."):
        if isinstance(value, Mapping) and part not in value:
            raise InputError(
                "a technique offers it to plans, and no recipe has it", "correct its offers", field=field
            )
        value = value[part] if isinstance(value, Mapping) else None
    return value


def changed(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return the recipe with dotted fields set; fields that derive from them are derived anew.

    Raises:
        InputError: the values contradict each other, or no technique implements them together.
    """
    optimizer = recipe.optimizer.model_dump(mode="json", exclude_unset=True)
    if "optimizer.name" in values and "optimizer.implementation" not in values:
        optimizer.pop("implementation", None)
    data = {**recipe.content(), "optimizer": optimizer}
    for field, value in values.items():
        data = set_field(data, field, value)
    found = recipe_from(data)
    registry.check(found.without_open_fields())  # A budget is planned before a step is built.
    return found


def space(
    recipe: Recipe, *, vary: Sequence[str] = (), fixed: Sequence[str] = (), keep_quality: bool
) -> Space:
    """Return the choices for a recipe.

    Args:
        vary: fields that may vary (``batch.micro``, or ``batch`` for all in it); empty: every field.
        fixed: fields that may not.
        keep_quality: exclude what changes the mathematics.

    Raises:
        InputError: ``vary`` names a field of which nothing is offered.
    """
    every = offered(recipe)
    _check_names(vary, {field for option in every for field, _ in option.values})

    def may_vary(field: str) -> bool:
        is_open = not vary or any(f"{field}.".startswith(f"{name}.") for name in vary)
        return is_open and not any(f"{field}.".startswith(f"{name}.") for name in fixed)

    options: list[Option] = []
    excluded: list[tuple[Option, str]] = []
    levels = [_level(value_in(recipe, RECOMPUTE))]
    solves = False
    for option in every:
        values = dict(option.values)
        if not all(may_vary(field) or value_in(recipe, field) == value for field, value in values.items()):
            continue
        if list(values) == [RECOMPUTE]:
            is_budget = isinstance(values[RECOMPUTE], dict) and "budget_gib" in values[RECOMPUTE]
            solves = solves or is_budget
            levels += [] if is_budget else [option._replace(family=RECOMPUTE)]
        elif keep_quality and option.numerics:
            excluded.append((option, f"changes the numerics ({option.numerics})"))
        elif all(value_in(recipe, field) == value for field, value in values.items()):
            pass  # It is the recipe's own.
        else:
            options.append(option)
    if may_vary(RECOMPUTE):
        levels.append(_level("none"))
    varies_batch = all(may_vary(field) for field in BATCH[:1])
    by_value: dict[str, Option] = {}
    for level in levels:
        by_value.setdefault(json.dumps(dict(level.values)[RECOMPUTE]), level)
    return Space(tuple(options), by_value, solves, varies_batch, tuple(excluded))


def offered(recipe: Recipe) -> list[Option]:
    """Return everything that techniques offer in place of the recipe's own values."""
    offers = [(OWN_FAMILY, offer) for offer in OWN if recipe.model.implementation == "hf"]
    offers += [(one.name, offer) for one in registry.in_order() for offer in one.offers(recipe)]
    return [option for family, offer in offers for option in _options(recipe, family, offer)]


def _level(value: Any) -> Option:
    """Return a value of ``recompute`` that no technique offers."""
    return Option(RECOMPUTE, ((RECOMPUTE, value),))


def _options(recipe: Recipe, family: str, offer: Offer) -> Iterator[Option]:
    values = tuple(leaves(offer.fields))
    several = [values]
    if dict(values).get("attention") == "best":
        several = [(("attention", kernel),) for kernel in fastest_kernels(recipe)[:KERNELS]]
    for one in several:
        yield Option(
            family,
            one,
            offer.expected,
            offer.kept_bytes,
            offer.numerics,
            offer.is_start,
            offer.is_slow,
            offer.speeds_up,
        )


def _check_names(vary: Sequence[str], offered: set[str]) -> None:
    for name in vary:
        if not any(f"{field}.".startswith(f"{name}.") for field in (*offered, *BATCH)):
            known = sorted({field.partition(".")[0] for field in (*offered, *BATCH)})
            remedy = f"name one of {', '.join(known)}"
            raise InputError("the planner offers no other value for it", remedy, field="vary", value=name)


def agree(options: Sequence[Option]) -> dict[str, Any] | None:
    """Return the fields that options set together; None where two of them differ."""
    values: dict[str, Any] = {}
    for option in options:
        for field, value in option.values:
            if values.setdefault(field, value) != value:
                return None
    return values


def named_in(error: InputError, options: Sequence[Option]) -> Option | None:
    """Return the option with the field that a refusal names, else one of the same section."""
    named = error.field or ""
    for prefix in filter(None, (f"{named}.".lstrip("."), named.partition(".")[0])):
        for option in options:
            if any(f"{field}.".startswith(prefix) for field, _ in option.values):
                return option
    return None
