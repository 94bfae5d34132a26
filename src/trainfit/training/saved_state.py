"""Validate a checkpoint's values before any of them is loaded.

A manifest proves that no byte has changed, not who wrote it. So names, types, shapes and ranges of all values
are checked against the step that loads them; the ``check_*`` functions raise InputError.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from trainfit.spec.errors import InputError
from trainfit.spec.value import Value
from trainfit.techniques import registry
from trainfit.techniques.base import StateKind
from trainfit.training.shards import local

MAX_STEPS = 2**53
NOT_NEGATIVE = ("squares", "rows", "columns")
"""Kinds of means of squares, whose roots are taken."""
BLOCKS = (256, 128)  # Elements per scale in 8 and in 4 bits (kernels/quantize/codebook.py)


class OptimizerPlain(Value):
    """Plain data of the optimizers: scalars by ``PARAMETER/KEY``, and the settings of their groups."""

    scalars: dict[str, int | float | bool | None]
    groups: list[list[dict[str, Any]]]


class RandomPlain(Value):
    """States of Python's and NumPy's random generators."""

    python: tuple[int, Annotated[list[int], Field(min_length=625, max_length=625)], float | None]
    numpy: tuple[str, Annotated[list[int], Field(min_length=624, max_length=624)], int, int, float]


class Best(Value):
    """The best evaluation so far: after which step, its loss, and how many were no better since."""

    step: Annotated[int, Field(ge=0, le=MAX_STEPS)]
    loss: float
    evaluations_since: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    last: Annotated[int, Field(ge=0, le=MAX_STEPS)]
    """The step after which was evaluated last."""


class SavedState(Value):
    """Content of ``state.json``."""

    step: Annotated[int, Field(ge=0, le=MAX_STEPS)]
    loss: float | None
    best: Best | None = None
    shared: dict[str, str]
    optimizer: OptimizerPlain
    scaler: dict[str, float | int] | None
    random: RandomPlain
    more_random: tuple[RandomPlain, ...] = ()  # Of ranks from 1 on


def check_group(own: Mapping[str, Any], saved: Mapping[str, Any], params: list[str]) -> None:
    """Refuse settings of a parameter group that differ from those of the recipe's optimizer."""
    if saved.get("params") != params:
        raise unlike("optimizer groups", "other parameters than the recipe's")
    for key, value in saved.items():
        if key == "params" or (key == "lr" and _is_size(value)):
            continue
        if key not in own:
            raise unlike(f"optimizer.groups.{key}", "no setting of this optimizer")
        mine = list(own[key]) if isinstance(own[key], tuple) else own[key]
        # Switches such as fused follow from the device, which may change.
        is_switch = all(one is None or isinstance(one, bool) for one in (mine, value))
        if not is_switch and (value != mine or isinstance(value, bool)):
            raise unlike(f"optimizer.groups.{key}", f"{value!r}, the recipe's is {mine!r}")


def check_parameter_state(optimizer: str, name: str, parameter: Tensor, state: Mapping[str, Any]) -> None:
    """Refuse state that the optimizer cannot have for this parameter."""
    present = {key: value for key, value in state.items() if value is not None}
    if not present:
        return
    facts = registry.optimizer_facts(optimizer)
    kinds: Mapping[str, StateKind] | None
    if facts is None:  # An optimizer of another package, whose technique declares no states.
        kinds = {key: _usual_kind(parameter, value) for key, value in present.items()}
    else:
        kinds = next((one for one in facts.states if one.keys() == present.keys()), None)
    if kinds is None:
        raise unlike(f"{name}/{', '.join(sorted(present))}", f"not what {optimizer} keeps")
    for key, value in present.items():
        problem = _problem(kinds[key], parameter, value)
        if problem:
            raise unlike(f"{name}/{key}", problem)


def _usual_kind(parameter: Tensor, value: Any) -> StateKind:
    return "weight" if isinstance(value, Tensor) and value.shape == parameter.shape else "number"


def check_scaler(own: Mapping[str, Any], saved: Mapping[str, Any] | None) -> None:
    """Refuse the state of a loss scaler with other keys, or with invalid numbers."""
    if saved is None or set(saved) != set(own):
        raise unlike("scaler", "not the state of a loss scaler")
    if not all(_is_size(value) for value in saved.values()) or not saved["scale"]:
        raise unlike("scaler", "its scale or growth is not a valid number")


def _problem(kind: StateKind, parameter: Tensor, value: Any) -> str:
    """Describe the problem of one value of a parameter's state; empty if it is valid."""
    if kind == "number":
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        return "" if _is_size(number) and number <= MAX_STEPS else "not a number from 0 on"
    if not isinstance(value, Tensor):
        return "not a tensor"
    codes, own = kind == "codes", local(value)
    if not _shape_fits(kind, parameter, value) or (value.dtype == torch.uint8) != codes:
        return f"{value.dtype} {tuple(value.shape)} for {tuple(parameter.shape)}"
    if not codes and not (value.is_floating_point() and bool(torch.isfinite(own).all())):
        return "not finite numbers"
    return "a negative mean of squares" if kind in NOT_NEGATIVE and bool((own < 0).any()) else ""


def _shape_fits(kind: StateKind, parameter: Tensor, value: Tensor) -> bool:
    shape, numel = parameter.shape, parameter.numel()
    if kind in ("weight", "squares"):
        return value.shape == shape
    if kind == "codes":
        return value.shape in (shape, (-(-numel // 2),))
    if kind == "scales":
        return value.shape in [(-(-numel // block),) for block in BLOCKS]
    return parameter.dim() >= 2 and value.numel() == numel // shape[-1 if kind == "rows" else -2]


def _is_size(value: Any) -> bool:
    """Return whether the value is a finite number of at least 0."""
    return type(value) in (int, float) and 0 <= value < math.inf


def unlike(name: str, problem: str) -> InputError:
    """Return the error of a value that does not fit the recipe."""
    remedy = "resume from an older checkpoint, or with the recipe it was saved with"
    return InputError(f"checkpoint and recipe do not fit: {problem}", remedy, field=name)
