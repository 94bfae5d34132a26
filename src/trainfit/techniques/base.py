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
    """Expected effect of an offer on a recipe's memory and time, as factors of the values before.

    The planner orders the offers of a recipe that does not fit by these factors, and skips those that are
    far from enough. Users see traced figures alone. The factors of this package are rounded from predictions
    for Llama models with 1 to 405 billion parameters.
    """

    weights: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0
    """Factor of the optimizer's state."""
    activations: float = 1.0
    """Factor of the blocks' saved and temporary tensors, without logits."""
    logits: float = 1.0
    communication: float = 1.0
    """Factor of the buffers of collectives."""
    time: float = 1.0
    """Factor of the time of a step with the same number of tokens."""
    to_host: float = 0.0
    """Share of the weights and the optimizer's state that moves to pinned memory of the host."""

    def then(self, other: Expected) -> Expected:
        """Return the joint effect of two offers."""
        factors = (a * b for a, b in zip(self[:-1], other[:-1], strict=True))
        return Expected(*factors, to_host=min(1.0, self.to_host + other.to_host))


AS_BEFORE = Expected()


@dataclass(frozen=True)
class Offer:
    """Fields that the planner may set together, to make a recipe smaller or faster."""

    fields: Data
    expected: Expected = AS_BEFORE
    """Effect of the fields on the recipe for which they are offered. By default none, so that the offer is
    never proposed as a remedy for a recipe that does not fit."""
    kept_bytes: tuple[float, float] = (0.0, 0.0)
    """Least bytes that every GPU keeps of each parameter, and in addition of each trained one. An offer that
    keeps more than the GPU's memory is not traced."""
    numerics: str = ""
    """How the fields change the mathematics, in a few words; empty: in rounding alone."""
    is_start: bool = False
    """The search starts with this offer, because it usually costs neither memory nor time."""
    is_slow: bool = False
    """Its trace takes seconds, so the offer is only added to the best recipe found without it."""
    speeds_up: Literal["all", "rest"] = "all"
    """``rest``: no matrix products, so it is not traced where the rest of a step is short."""


StateKind = Literal["number", "weight", "squares", "rows", "columns", "codes", "scales"]
"""A state that an optimizer keeps of a weight.

``number``: at least 0, such as the count of steps. ``weight``: of the weight's shape. ``squares``: of the
weight's shape, not negative. ``rows``, ``columns``: one number for each row or column of a matrix, not
negative. ``codes``: 8 or 4 bits an element. ``scales``: one for each block of codes.
"""


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts about an optimizer for reports, checkpoints and parallelism."""

    moments: Callable[[Recipe, float], tuple[float, ...]]
    """(recipe, bytes of a trained weight) -> bytes per parameter of each state of the weight's size."""
    states: tuple[dict[str, StateKind], ...]
    """States of one weight after an update, name -> kind; one entry for each case of weights and settings.
    Empty: a checkpoint cannot hold it, and ``train`` refuses it."""
    constants: tuple[str, ...] = ()
    """Further keys of the state: tables that all weights share. They are not saved, as the optimizer makes
    them again."""
    sharded_by: tuple[str, ...] = ()
    """Techniques on whose shards its update equals that of whole weights: ``fsdp``, ``expert_parallel``,
    ``tensor_parallel``."""
    describe: Callable[[Recipe, float], str] | None = None
    """(recipe, bytes of a trained weight) -> the state in words; by default name and ``moments``."""


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
    """Dotted fields that turn it on, those of ``covers`` by default. The control has their default values."""
    triton: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Field -> the values that run Triton kernels; refused on GPUs that Triton does not support."""
    when: Callable[[Recipe], bool] | None = None
    """Whether it applies to a recipe; None: it applies where the recipe has values of ``covers``."""
    check: Callable[[Recipe], None] = lambda recipe: None
    """Raises InputError for fields that cannot be combined with it."""
    check_gpu: Callable[[Recipe, Gpu], None] = lambda recipe, gpu: None
    """Raises InputError if the recipe's GPU, a row of the catalog, lacks what it needs."""
    check_device: Callable[[Recipe, str], None] = lambda recipe, device_type: None
    """Raises InputError if a real device ("cuda", "cpu") lacks what it needs. Not called for the virtual
    GPU."""
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
    """Returns the fields that the planner may try in place of the recipe's own values."""
    build: Callable[..., tuple[nn.Module, HostBlocks]] | None = None
    """(recipe, on_model, **options of ``build_model``) -> model, blocks whose weights are on the host."""
    optimizer: OptimizerFacts | None = None  # For techniques that cover ``optimizer.name``
    label_blocks: Callable[[Recipe, nn.Module], None] = lambda recipe, model: None
    """Labels blocks that differ, before a traced model is shortened."""
    min_repeated: Callable[[Recipe], int] = lambda recipe: 1
    """The least number of equal layers that must be traced together."""
    take_turns: Callable[[Recipe], int] = lambda recipe: 1
    """The number of buffers in which layers take turns: a multiple of so many is traced together."""
    trace_whole: Callable[[Recipe], bool] = lambda recipe: False
    """True if every layer must be traced, because equal layers differ in memory or operations."""
    may_shorten: bool = False
    """Although every layer must be traced, a few are enough to compare recipes: layers differ slightly."""

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
    """Return the value of a dotted field; of a mapping such as ``{every: 2}`` its key, ``every``, and of a
    quantised base the kind.
    """
    value: Any = recipe
    for part in dotted.split("."):
        value = getattr(value, part, None)
    if dotted == "quantize" and hasattr(value, "kind"):
        return value.kind
    if hasattr(value, "model_dump"):
        return next(iter(value.model_dump()))
    return value
