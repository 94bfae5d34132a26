"""What each technique refuses, found by asking: combinations of techniques are put to the recipes' own check.

Enters: the techniques' examples. Leaves: by technique, the lines that ``registry.check`` answers with. Assumes the extras peft
and torchao, without which everything that needs them would be refused. What only shows once a model is built is not asked here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.technique_suite import BLOCKS_OF_REFERENCE, REFERENCE, Data
from trainfit.spec.errors import InputError
from trainfit.spec.optional import require
from trainfit.spec.recipe import Recipe
from trainfit.spec.recipe_file import merge, recipe_from
from trainfit.techniques import registry
from trainfit.techniques.base import Technique

NEEDED = ("peft", "torchao")

MORE: dict[str, tuple[Data, ...]] = {
    "adafactor": tuple(
        {"optimizer": {"name": "adafactor", "implementation": way, "momentum": momentum}}
        for way in ("foreach", "fused")
        for momentum in (0.0, 0.9)
    ),
    "adamw": tuple({"optimizer": {"name": "adamw", "implementation": way}} for way in ("fused", "forloop")),
    "adamw_low_bit": ({"optimizer": {"name": "adamw4bit", "implementation": "forloop"}},),
    "attention": tuple({"attention": name} for name in ("flash", "efficient", "math", "triton")),
    "loader": ({"loader": {"prefetch": 4}},),
    "muon": ({"optimizer": {"name": "muon", "momentum": 0.0}},),
    "offload_weights": ({"offload": {"weights": True}, "recompute": "full"},),
    "optimizer_in_backward": ({"optimizer": {"in_backward": "block"}},),
    "precision": ({"precision": "amp-fp16"},),
    "prefix_tuning": ({"adapter": {"kind": "prefix", "rank": 8}},),
    "quantize": ({"quantize": "int8"}, {"quantize": "fp8"}),
    "recompute_layers": (
        {"recompute": {"layers": [{"recompute": "none", "offload": 0.5, "count": BLOCKS_OF_REFERENCE}]}},
        {"recompute": {"budget_gib": 20}},
    ),
    "recompute_selective": ({"recompute": {"selective": {"save": ["attention"]}}},),
    "sgd": ({"optimizer": {"name": "sgd", "implementation": "foreach"}},),
    "soft_prompts": ({"adapter": {"kind": "p-tuning"}}, {"adapter": {"kind": "prompt", "rank": 8}}),
}  # fmt: skip
"""Ways to ask for a technique that its page shows no figures of."""

SETTINGS: tuple[Data, ...] = (
    {"optimizer": {"implementation": "foreach"}},
    {"optimizer": {"momentum": 0.9}},
    {"hardware": {"gpu": "a100-sxm4-80gb"}},
    {"batch": {"micro": 1, "seq": 1000}},
    {"model": {"implementation": "native"}},
)
"""What else is tried beside each technique."""


@dataclass(frozen=True)
class Refusal:
    """A combination that is refused, in the check's own words."""

    causes: frozenset[str]
    """The techniques without any of which it would not have been refused."""
    kind: tuple[str, str, str]
    """Field, problem and remedy: refusals of other values of one field are of one kind."""
    line: str


@dataclass(frozen=True)
class Told:
    """One kind of refusal on a technique's page."""

    line: str
    beside: tuple[str, ...]
    """The techniques with which it happens; none: it happens by itself."""


def refused(technique: str) -> list[Told]:
    """What the technique refuses, or is refused with: each kind once, its first line.

    Raises:
        InputError: a package is missing that techniques need.
    """
    kinds: dict[tuple[str, str, str], list[Refusal]] = {}
    for refusal in all_refusals():
        if technique in refusal.causes:
            kinds.setdefault(refusal.kind, []).append(refusal)
    told = []
    for found in kinds.values():
        by_itself = any(refusal.causes == {technique} for refusal in found)
        partners = (
            set() if by_itself else {name for refusal in found for name in refusal.causes - {technique}}
        )
        told.append(Told(found[0].line, tuple(sorted(partners))))
    return sorted(told, key=lambda one: (bool(one.beside), one.line))


def refused_on_cpu(technique: str) -> list[str]:
    """What a real CPU lacks, of the ways to ask for the technique."""
    lines = []
    for variant in _variants(technique):
        try:
            registry.check_device(recipe_from(_laid(technique, variant)), "cpu")
        except InputError as error:
            lines.append(str(error))
    return list(dict.fromkeys(lines))


@cache
def all_refusals() -> tuple[Refusal, ...]:
    """Every refusal of a technique by itself, beside a setting and beside another technique."""
    for name in NEEDED:
        require(name, name)
    return tuple(_found())


def _found() -> Iterator[Refusal]:
    for technique in sorted(registry.techniques()):
        for variant in _variants(technique):
            if error := _refusal(merge(REFERENCE, variant)):
                yield _told({technique}, error)
            if _refusal(_laid(technique, variant)):
                continue  # With anything beside it would be refused in the same words.
            for setting in SETTINGS:
                data = merge(_laid(technique, variant), setting)
                if (error := _refusal(data)) and not (
                    _same(error, _refusal(merge(REFERENCE, setting))) and _owner(data, error) != technique
                ):
                    yield _told({technique}, error)
            for other in sorted(registry.techniques()):
                if technique < other:
                    yield from _pairs(technique, variant, other)


def _pairs(technique: str, variant: Data, other: str) -> Iterator[Refusal]:
    for partner in _variants(other):
        if clash(variant, partner) or _refusal(_laid(other, partner)):
            continue
        beside = merge(_needs(technique, variant), _needs(other, partner))
        if error := _refusal(merge(merge(merge(REFERENCE, beside), variant), partner)):
            yield _told({technique, other}, error)


def _told(causes: set[str], error: InputError) -> Refusal:
    return Refusal(frozenset(causes), (error.field, error.problem, error.remedy), str(error))


def _refusal(data: Data) -> InputError | None:
    try:
        registry.check(recipe_from(data))
    except InputError as error:
        return error
    return None


def _same(error: InputError, other: InputError | None) -> bool:
    return str(error) == str(other)


def _owner(data: Data, error: InputError) -> str | None:
    """The technique whose own check says so; None: the recipe itself, or no technique covers the value."""
    try:
        recipe = recipe_from(data)
    except InputError:
        return None
    for name, technique in sorted(registry.techniques().items()):
        if technique.applies(recipe) and _says(technique, recipe, error):
            return name
    return None


def _says(technique: Technique, recipe: Recipe, error: InputError) -> bool:
    try:
        technique.check(recipe)
    except InputError as own:
        return str(own) == str(error)
    return False


def _variants(technique: str) -> tuple[Data, ...]:
    return (*registry.techniques()[technique].examples, *MORE.get(technique, ()))


def _needs(technique: str, variant: Data) -> Data:
    """What has to stand beside the variant: nothing, where the check lets it stand alone."""
    return registry.techniques()[technique].needs if _refusal(merge(REFERENCE, variant)) else {}


def _laid(technique: str, variant: Data) -> Data:
    return merge(merge(REFERENCE, _needs(technique, variant)), variant)


def clash(first: Data, second: Data) -> bool:
    """Whether both write one field, with different values: then they are no combination, but a choice."""
    for key in first.keys() & second.keys():
        one, other = first[key], second[key]
        both: Any = isinstance(one, dict) and isinstance(other, dict) and key not in ("recompute", "adapter")
        if clash(one, other) if both else one != other:
            return True
    return False
