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

STEPS = Annotated[int, Field(ge=0, le=2**53)]
AS_PARAMETER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "variance")
"""Optimizer state with the parameter's own shape."""
NOT_NEGATIVE = "exp_avg_sq max_exp_avg_sq variance row_var col_var exp_avg_sq_row exp_avg_sq_col".split()
"""Means of squares, whose roots are taken."""
BLOCKS = (256, 128)
"""Elements per scale in 8 and in 4 bits (kernels/quantize/codebook.py)."""
CODED = frozenset(f"{name}_{part}" for name in ("exp_avg", "exp_avg_sq") for part in ("codes", "scales"))
ADAMW = frozenset({"step", "exp_avg", "exp_avg_sq"})
MOMENTUM = (frozenset({"momentum_buffer"}), frozenset({"step", "momentum_buffer"}))
FACTORED = (frozenset({"step", "row_var", "col_var"}), frozenset({"step", "variance"}))
WITH_MOMENTUM = frozenset({"step", "exp_avg", "RMS"})
"""State of transformers' Adafactor."""
KEYS = {
    "adamw": (ADAMW,),
    "adamw8bit": (ADAMW, CODED | {"step"}),
    "adamw4bit": (ADAMW, CODED | {"step"}),
    "adafactor": (
        *FACTORED,
        WITH_MOMENTUM | {"exp_avg_sq"},
        WITH_MOMENTUM | {"exp_avg_sq_row", "exp_avg_sq_col"},
    ),
    "sgd": (*MOMENTUM, frozenset({"step"})),
    "muon": (*MOMENTUM, ADAMW),
}
"""``optimizer.name`` -> allowed sets of state keys of one parameter that had a gradient. An optimizer added
from outside has no row: its tensors are checked, its keys are not."""


class OptimizerPlain(Value):
    """Plain data of the optimizers: scalars by ``PARAMETER/KEY``, and the settings of their groups."""

    scalars: dict[str, int | float | bool | None]
    groups: list[list[dict[str, Any]]]


class RandomPlain(Value):
    """States of Python's and NumPy's random generators."""

    python: tuple[int, Annotated[list[int], Field(min_length=625, max_length=625)], float | None]
    numpy: tuple[str, Annotated[list[int], Field(min_length=624, max_length=624)], int, int, float]


class SavedState(Value):
    """Content of ``state.json``."""

    step: STEPS
    loss: float | None
    shared: dict[str, str]
    optimizer: OptimizerPlain
    scaler: dict[str, float | int] | None
    random: RandomPlain


def check_group(own: Mapping[str, Any], saved: Mapping[str, Any], params: list[str], file: str) -> None:
    """Refuse settings of a parameter group that differ from those of the recipe's optimizer."""
    if saved.get("params") != params:
        raise unlike("optimizer groups", "other parameters than the recipe's", file)
    for key, value in saved.items():
        if key == "params":
            continue
        if key not in own:
            raise unlike(f"optimizer.groups.{key}", "no setting of this optimizer", file)
        is_rate = key == "lr" and _is_number(value) and 0 <= value < math.inf
        mine = list(own[key]) if isinstance(own[key], tuple) else own[key]
        # Switches such as fused follow from the device, which may change.
        is_switch = all(one is None or isinstance(one, bool) for one in (mine, value))
        if not (is_rate or is_switch) and (value != mine or isinstance(value, bool)):
            raise unlike(f"optimizer.groups.{key}", f"{value!r}, the recipe's is {mine!r}", file)


def check_parameter_state(
    optimizer: str, name: str, parameter: Tensor, state: Mapping[str, Any], file: str
) -> None:
    """Refuse state that the optimizer cannot have for this parameter."""
    keys = frozenset(key for key, value in state.items() if value is not None)
    if keys and optimizer in KEYS and keys not in KEYS[optimizer]:
        raise unlike(f"{name}/{', '.join(sorted(keys))}", f"not what {optimizer} keeps", file)
    for key, value in state.items():
        if value is not None:
            _check_tensor(f"{name}/{key}", key, parameter, value, file)


def check_scaler(own: Mapping[str, Any], saved: Mapping[str, Any] | None, file: str) -> None:
    """Refuse the state of a loss scaler with other keys, or with numbers that cannot scale."""
    if saved is None or set(saved) != set(own):
        raise unlike("scaler", "not the state of a loss scaler", file)
    if not all(_is_number(value) and 0 <= value < math.inf for value in saved.values()) or not saved["scale"]:
        raise unlike("scaler", "numbers that scale nothing", file)


def _check_tensor(path: str, key: str, parameter: Tensor, value: Any, file: str) -> None:
    if key in ("step", "RMS"):
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if isinstance(number, Tensor) or not _is_number(number) or not 0 <= number <= 2**53:
            raise unlike(path, "not a number from 0 on", file)
        return
    if not isinstance(value, Tensor):
        raise unlike(path, "not a tensor", file)
    codes = key.endswith("_codes")
    if not _shape_fits(key, parameter, value) or (value.dtype == torch.uint8) != codes:
        raise unlike(path, f"{value.dtype} {tuple(value.shape)} for {tuple(parameter.shape)}", file)
    if value.is_complex() or not (codes or (value.is_floating_point() and bool(torch.isfinite(value).all()))):
        raise unlike(path, "not finite numbers", file)
    if key in NOT_NEGATIVE and bool((value < 0).any()):
        raise unlike(path, "a negative mean of squares", file)


def _shape_fits(key: str, parameter: Tensor, value: Tensor) -> bool:
    shape, numel = parameter.shape, parameter.numel()
    if key in AS_PARAMETER:
        return value.shape == shape
    if key.endswith("_codes"):
        return value.shape == shape or value.shape == (-(-numel // 2),)
    if key.endswith("_scales"):
        return value.shape in [(-(-numel // block),) for block in BLOCKS]
    if parameter.dim() >= 2 and key.startswith(("row_", "col_", "exp_avg_sq_")):
        return value.numel() == numel // shape[-1 if "row" in key else -2]
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def unlike(name: str, problem: str, file: str) -> InputError:
    """Return the error of a value that does not fit the recipe."""
    remedy = "resume from an older checkpoint, or with the recipe it was saved with"
    return InputError(f"checkpoint and recipe do not fit: {problem}", remedy, field=name, file=file)
