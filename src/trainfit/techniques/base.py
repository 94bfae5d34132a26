"""Technique: the declaration of one change to a training step. Imports no torch, as refusals need none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trainfit.spec.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from trainfit.offload.blocks import HostBlocks
    from trainfit.spec.hardware import Gpu
    from trainfit.spec.recipe import Recipe
    from trainfit.techniques.draft import Draft

Data = dict[str, Any]  # Fields of a recipe as plain data


@dataclass(frozen=True)
class Draw:
    """Sampling of a technique by random generators of recipes."""

    alone: Callable[[random.Random, Data], Data] | None = None
    """(generator, recipe so far) -> fields that turn the technique on, in one of its variants."""
    weights: dict[str, dict[Any, int]] = field(default_factory=dict)
    """Field -> value -> its weight in recipes whose fields are all drawn."""
    share: float | None = None
    """Probability that the fields of ``weights`` leave their default; None: they are always drawn."""
    options: Callable[[random.Random], Data] | None = None
    """Further keys next to a drawn value, such as an optimizer's implementation."""


class Expected(NamedTuple):
    """What an offer is expected to do to a recipe's memory and time: factors of what each was before.

    They decide what the planner traces first where a recipe does not fit, and leave out what is far from
    enough. A user reads only what was traced. Those of this package are rounded from predicted recipes of
    Llama models with 1 to 405 billion parameters.
    """

    weights: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0
    """Of the optimizer's state."""
    activations: float = 1.0
    """Of what the blocks save and compute with, the logits aside."""
    logits: float = 1.0
    communication: float = 1.0
    """Of buffers of collectives."""
    time: float = 1.0
    """Of a step with as many tokens."""
    to_host: float = 0.0
    """Share of the weights and the optimizer's state that moves to pinned memory of the host."""

    def then(self, other: Expected) -> Expected:
        """Return the effect of both."""
        factors = (a * b for a, b in zip(self[:-1], other[:-1], strict=True))
        return Expected(*factors, to_host=min(1.0, self.to_host + other.to_host))


AS_BEFORE = Expected()


@dataclass(frozen=True)
class Offer:
    """Fields that the planner may set together, to make a recipe smaller or faster."""

    fields: Data
    expected: Expected = AS_BEFORE
    """Memory and time of the recipe for which it is offered, with the fields. By default as without them, so
    that it is never proposed as a remedy for a recipe that does not fit."""
    kept_bytes: tuple[float, float] = (0.0, 0.0)
    """Least bytes that every GPU keeps of each parameter, and, in addition, of each trained one.
    An offer that keeps more than there is is not traced."""
    numerics: str = ""
    """What they change in the mathematics, in a few words; empty: nothing beyond rounding."""
    is_start: bool = False
    """The search starts with it: it usually costs neither memory nor time."""
    is_slow: bool = False
    """Its trace takes seconds, so it is only added to the best recipe found without it."""
    speeds_up: Literal["all", "rest"] = "all"
    """``rest``: no matrix products, so it is not traced where the rest of a step is short."""


StateKind = Literal["number", "weight", "squares", "rows", "columns", "codes", "scales"]
"""A state that an optimizer keeps of a weight.

``number``: at least 0, such as the count of steps. ``weight``: of the weight's shape. ``squares``: so, not
negative. ``rows``, ``columns``: one number for each row or column of a matrix, not negative. ``codes``: 8 or
4 bits an element. ``scales``: one for each block of codes.
"""


@dataclass(frozen=True)
class OptimizerFacts:
    """What reports, checkpoints and kinds of parallelism need to know of an optimizer."""

    moments: Callable[[Recipe, float], tuple[float, ...]]
    """(recipe, bytes of a trained weight) -> bytes a parameter of each state with as many elements."""
    states: tuple[dict[str, StateKind], ...]
    """State of one weight after an update, name -> kind; several where it depends on weight or settings."""
    constants: tuple[str, ...] = ()
    """Further keys of the state: tables that all weights share. They are not saved, as the optimizer makes
    them again."""
    sharded_by: tuple[str, ...] = ()
    """Techniques on whose shards its update equals that of whole weights: ``fsdp``, ``expert_parallel``,
    ``tensor_parallel``."""
    describe: Callable[[Recipe, float], str] | None = None
    """(recipe, bytes of a trained weight) -> its state in words; by default its name and ``moments``."""


@dataclass(frozen=True)
class Technique:
    """One change to a plain training step. A module of this package declares it as ``TECHNIQUE``."""

    name: str  # As in records and pages
    order: int  # Techniques are applied by ascending order
    title: str  # As in tables, and as the heading of its paragraph in docs/reference/techniques.md
    apply: Callable[[Recipe, Draft], None] = lambda recipe, draft: None
    """Changes the draft. Torch is imported inside."""
    covers: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Dotted field -> the values that this technique implements."""
    fields: tuple[str, ...] = ()
    """Dotted fields that turn it on, those of ``covers`` by default. At their defaults: the control."""
    triton: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Field -> the values that run Triton kernels; refused on GPUs that Triton does not support."""
    when: Callable[[Recipe], bool] | None = None
    """Predicate of its application, where that differs from a recipe with the values of ``covers``."""
    check: Callable[[Recipe], None] = lambda recipe: None
    """Raises InputError for what cannot be combined with it."""
    check_gpu: Callable[[Recipe, Gpu], None] = lambda recipe, gpu: None
    """Raises InputError for what the catalog's row of the recipe's GPU lacks."""
    check_device: Callable[[Recipe, str], None] = lambda recipe, device_type: None
    """Raises InputError for what a real device ("cuda", "cpu") lacks. Not called for the virtual GPU."""
    library: tuple[str, str] | None = None
    """Module of an optional package that it runs, and the extra of pyproject.toml that installs it. Imported
    before a trace begins: tensors made by the import are no part of the step."""
    assumes: Callable[[Recipe], tuple[str, ...]] = lambda recipe: ()
    """Lines that a prediction states among its assumptions."""
    describe: Callable[[Recipe], str] = lambda recipe: ""
    """A few words for tables of recipes; empty where there is nothing to say."""
    examples: tuple[Data, ...] = ()
    """Fields that turn it on, together with ``needs``; by default the first value of ``covers``."""
    variants: tuple[Data, ...] = ()  # Further fields that turn it on, which no record of results measures
    needs: Data = field(default_factory=dict)  # Fields that the examples, and their control, require
    draw: Draw = Draw()
    offers: Callable[[Recipe], Iterable[Offer]] = lambda recipe: ()
    """Returns what the planner may try in place of the recipe's own values."""
    build: Callable[..., tuple[nn.Module, HostBlocks]] | None = None
    """(recipe, on_model, **options of ``build_model``) -> model, blocks whose weights are on the host."""
    optimizer: OptimizerFacts | None = None  # Of those that cover ``optimizer.name``
    label_blocks: Callable[[Recipe, nn.Module], None] = lambda recipe, model: None
    """Labels blocks that differ, before a traced model is shortened."""
    min_repeated: Callable[[Recipe], int] = lambda recipe: 1
    """The least number of equal layers that must be traced together."""
    trace_whole: Callable[[Recipe], bool] = lambda recipe: False
    """True if every layer must be traced, because equal layers do not act alike."""
    may_shorten: bool = False
    """Where every layer must be traced, a few are enough to compare recipes: layers differ slightly."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", self.fields or tuple(self.covers))
        first = tuple(_nested(field, values[0]) for field, values in self.covers.items())[:1]
        object.__setattr__(self, "examples", self.examples or first)

    def requested(self, recipe: Recipe) -> bool:
        """Return whether the recipe has a value that this technique covers, in each of its fields."""
        return bool(self.covers) and all(value_at(recipe, at) in values for at, values in self.covers.items())

    def applies(self, recipe: Recipe) -> bool:
        """Return whether the technique changes this recipe's step."""
        return self.requested(recipe) if self.when is None else self.when(recipe)


def _nested(dotted: str, value: Any) -> Data:
    """Return ``{"a": {"b": value}}`` for ``a.b``."""
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return value


def refusal(recipe: Recipe, dotted: str, problem: str, remedy: str) -> InputError:
    """Return the error that refuses a recipe's value of a dotted field."""
    value: Any = recipe.model_dump()
    for part in dotted.split("."):
        value = value[part]
    return InputError(problem, remedy, field=dotted, value=value)


def value_at(recipe: Recipe, dotted: str) -> Any:
    """Return the value of a dotted field; of a mapping such as ``{every: 2}`` its key, ``every``.

    Of a quantised base it is the kind.
    """
    value: Any = recipe
    for part in dotted.split("."):
        value = getattr(value, part, None)
    if dotted == "quantize" and hasattr(value, "kind"):
        return value.kind
    if hasattr(value, "model_dump"):
        return next(iter(value.model_dump()))
    return value
