"""Whose failure it is when a model's forward fails: transformers' with this config, or ours.

A config.json can pass transformers' checks and still describe a model that cannot run (rotary sizes wider
than a head, more experts chosen than there are). transformers is then run alone: the same model, a plain
forward on fake tensors, nothing of ours around it. If the same line of transformers fails there too, it is
the config.
"""

import traceback
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)

from trainfit.models.build import build_model
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques.draft import weight_dtype
from trainfit.virtual.trace.cpu_fakes import CpuFakeMode

OF_FAKE_TENSORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
"""Raised where a fake tensor's value is read."""
AUTOCAST = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}


def refuse_config(recipe: Recipe, error: Exception) -> None:
    """Return where transformers alone does not fail in the same place as ``error``.

    Raises:
        InputError: it does; names the exception, or that the model depends on values of tensors.
    """
    if recipe.model.implementation != "hf":
        return
    alone = _failure_alone(recipe)
    if alone is None:
        return
    ours, theirs = _line_of_transformers(error), _line_of_transformers(alone)
    # With values that the virtual GPU made up the model may come further.
    if isinstance(alone, OF_FAKE_TENSORS) and ours and theirs and ours[0] == theirs[0]:
        at = f"{Path(theirs[0]).name}, line {theirs[1]}"
        raise InputError(
            f"the model's forward depends on values of its tensors ({at}), which the virtual GPU lacks",
            "measure it on a GPU, or name another model",
            field="model.config",
            value=recipe.model.display_name,
        ) from error
    # Of compiled code the traceback names no line.
    if isinstance(alone, OF_FAKE_TENSORS) or (not recipe.compile and ours != theirs):
        return
    cause = f"{alone}".strip().partition("\n")[0]
    raise InputError(
        f"transformers' own model fails with this config, without trainfit: {type(alone).__name__}: {cause}",
        "correct the config (or precision and batch.seq, where the exception is about them)",
        field="model.config",
        value=recipe.model.display_name,
    ) from error


def _failure_alone(recipe: Recipe) -> Exception | None:
    """Return what transformers raises when it builds the recipe's model and runs a forward, or None."""
    from transformers.initialization import no_init_weights

    failure = _run_alone(recipe, nullcontext())
    # Some initialisation reads values.
    return _run_alone(recipe, no_init_weights()) if isinstance(failure, OF_FAKE_TENSORS) else failure


def _run_alone(recipe: Recipe, initialization: AbstractContextManager[Any]) -> Exception | None:
    autocast = AUTOCAST.get(recipe.precision)
    try:
        with CpuFakeMode(), torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            with initialization:
                model = build_model(
                    recipe.model, dtype=weight_dtype(recipe), device="cpu", attention=recipe.attention
                )
            ids_bs = torch.zeros(recipe.micro_sequences, recipe.batch.seq, dtype=torch.int64)
            model(input_ids=ids_bs, labels=ids_bs)
    except Exception as error:
        return error
    return None


def _line_of_transformers(error: Exception) -> tuple[str, int | None] | None:
    """File and line of the innermost frame in transformers, if there is one."""
    frames = [
        (frame.filename, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
        if "/transformers/" in frame.filename.replace("\\", "/")
    ]
    return frames[-1] if frames else None
