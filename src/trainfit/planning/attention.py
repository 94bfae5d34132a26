"""Choose a kernel for ``attention: best``: the fastest measured one that supports the recipe.

A GPU without measurements takes those of a GPU of the same compute capability.

Support is decided by the recipe's own checks and by a trace on the virtual GPU. Where nothing is measured
the choice is PyTorch's own (``sdpa``). Kernels whose times differ by less than they scatter count as tied;
of those the one with the lowest predicted peak is taken.
"""

from collections.abc import Sequence
from typing import NamedTuple

from trainfit.catalog.attention import AttentionRun, Dtype, Found, attention_runs, nearest
from trainfit.catalog.load import gpus, model_config
from trainfit.catalog.names import CPU
from trainfit.flops.shape import shape_of
from trainfit.ledger.ledger import Ledger
from trainfit.prediction.estimate import replay_on
from trainfit.prediction.machine import Machine, machine_of
from trainfit.prediction.predict import ledger_of
from trainfit.prediction.time.attention_time import FAR_BEHIND
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.recipe import AttentionKernel, Recipe
from trainfit.techniques import registry

COMPARED_WITH: tuple[AttentionKernel, ...] = (
    "flash", "sdpa", "cudnn", "triton", "efficient", "eager", "math",
)  # fmt: skip
"""Kernels to compare with: the first that was measured together with the chosen one is reported."""


class Choice(NamedTuple):
    """The recipe with a kernel in place of ``best``, and one line with the reason."""

    recipe: Recipe
    note: str


def choose(
    recipe: Recipe,
    machine: Machine | None = None,
    *,
    gpu: str | None = None,
    device_type: str | None = None,
    runs: Sequence[AttentionRun] | None = None,
    deterministic: bool = False,
) -> Choice:
    """Return the recipe with the fastest kernel that supports it.

    Args:
        machine: of the recipe's ``hardware``; None: it is looked up.
        gpu: catalog name of the GPU that runs it; None: the recipe's ``hardware.gpu``.
        device_type: of the real device that runs it, which is checked too; None: a prediction. For ``cpu`` no
            measurement applies.
        runs: None: the catalog's.
        deterministic: the step runs with deterministic algorithms, which cuDNN's attention does not have.

    Raises:
        InputError: an unknown model or GPU.
    """
    assert recipe.attention == "best"
    name = recipe.hardware.gpu if gpu is None else gpu
    found = _measured(recipe, name, device_type, attention_runs() if runs is None else runs)
    if isinstance(found, str):
        return _with(recipe, "sdpa", f"{found}, so PyTorch chooses")
    if machine is None or machine.row.name != name:
        machine = machine_of(recipe.hardware.model_copy(update={"gpu": name}))
    refusals: dict[str, list[str]] = {}
    right: dict[AttentionKernel, Ledger] = {}
    for kernel in sorted(found.shape.seconds, key=lambda one: found.shape.seconds[one]):
        if right and not found.shape.are_equal(next(iter(right)), kernel):
            break
        tried = _tried(recipe, kernel, machine, device_type, deterministic)
        if isinstance(tried, Ledger):
            right[kernel] = tried
        else:
            refusals.setdefault(tried, []).append(kernel)
    if not right:
        return _with(recipe, "sdpa", "; ".join(["PyTorch chooses", *_reasons(refusals)]))
    kernel, why = _smallest(right, machine.gpu)
    reasons = [*_reasons(refusals), "the times are of plain causal attention"] if refusals else []
    return _with(recipe, kernel, "; ".join([_speedup_text(found, kernel, recipe.batch.seq), *why, *reasons]))


def fastest_kernels(recipe: Recipe) -> list[AttentionKernel]:
    """Return the kernels measured for the recipe's heads on its GPU, the fastest first; none: no entry.

    Left out are those that take over ``FAR_BEHIND`` times as long as the fastest. Whether the others support
    the recipe is not checked.
    """
    found = _measured(recipe, recipe.hardware.gpu, None, attention_runs())
    if isinstance(found, str):
        return []
    seconds = found.shape.seconds
    near: list[AttentionKernel] = [
        kernel for kernel in seconds if seconds[kernel] <= FAR_BEHIND * min(seconds.values())
    ]
    return sorted(near, key=lambda kernel: seconds[kernel])


def _smallest(right: dict[AttentionKernel, Ledger], gpu: Gpu) -> tuple[AttentionKernel, list[str]]:
    """Return the tied kernel with the lowest peak (PyTorch's before trainfit's), and a line on ties."""
    if len(right) == 1:
        return next(iter(right)), []
    peaks = {name: replay_on(gpu, ledger)[0].peak_allocated_bytes for name, ledger in right.items()}
    first, *rest = sorted(right, key=lambda name: (peaks[name], COMPARED_WITH.index(name)))
    tie = f"tied with {' and '.join(rest)} within the spread of the measurements"
    return first, [f"{tie}, with the lowest peak"]


def _reasons(refusals: dict[str, list[str]]) -> list[str]:
    return [
        f"{' and '.join(kernels)} {'is' if len(kernels) == 1 else 'are'} refused: {why}"
        for why, kernels in refusals.items()
    ]


def _measured(recipe: Recipe, gpu: str, device_type: str | None, runs: Sequence[AttentionRun]) -> Found | str:
    """Return the nearest measurement, or the reason why there is none."""
    if CPU in (device_type, gpu):
        return "nothing is measured on a CPU"
    dtype: Dtype = "fp32" if recipe.precision == "fp32" else "bf16"
    config = model_config(recipe.model.config)
    if config.get("attn_logit_softcapping") is not None:  # transformers 5.17 drops the cap in SDPA silently.
        return "nothing is measured for capped scores"
    try:
        shape = shape_of(config)
    except InputError as error:
        return f"the head size of this model is not known ({error.problem})"
    head = shape.head_dim
    if shape.value_dim != head:
        return f"nothing is measured for heads of {head} with values of {shape.value_dim}"
    for measured in (gpu, *_equal_gpus(gpu, runs)):
        found = nearest(runs, gpu=measured, dtype=dtype, head=head, seq=recipe.batch.seq)
        if found is not None:
            return found
    return f"nothing is measured on {gpu} for {dtype} and head size {head}"


def _equal_gpus(name: str, runs: Sequence[AttentionRun]) -> list[str]:
    """Return the measured GPUs of this one's compute capability: they run the same kernels.

    An H100 has an H200's multiprocessors, and attention is bound by them rather than by memory.
    """
    row = gpus().get(name)
    if row is None or row.compute_capability is None:
        return []
    measured = dict.fromkeys(run.gpu for run in runs if run.shapes and run.gpu != name)
    return [other for other in measured if gpus()[other].compute_capability == row.compute_capability]


def _tried(
    recipe: Recipe, kernel: AttentionKernel, machine: Machine, device_type: str | None, deterministic: bool
) -> Ledger | str:
    """Return the ledger of the recipe with this kernel, or why such a step cannot be built or run."""
    hardware = recipe.hardware.model_copy(update={"gpu": machine.row.name})
    tried = recipe.without_open_fields().model_copy(update={"attention": kernel, "hardware": hardware})
    try:
        registry.check(tried, machine.row)
        if device_type is not None:
            registry.check_device(tried, device_type)
        return ledger_of(tried, machine, deterministic=deterministic)
    except InputError as error:
        return error.problem.rstrip(". ")


def _speedup_text(found: Found, kernel: AttentionKernel, seq: int) -> str:
    """Describe the measurement: speed-up over another kernel, length, date, GPU and torch version."""
    run, shape = found
    at = f"at {shape.seq}" + ("" if shape.seq == seq else f", the measured length nearest to {seq}")
    others: list[AttentionKernel] = [name for name in shape.seconds if name != kernel]
    other = sorted(others, key=lambda name: COMPARED_WITH.index(name))[0]
    faster = f"{shape.seconds[other] / shape.seconds[kernel]:.2f} x {other}"
    return f"{faster} {at}, measured {run.measured_at[:10]} on {run.gpu} with torch {run.torch}"


def _with(recipe: Recipe, kernel: AttentionKernel, why: str) -> Choice:
    return Choice(recipe.model_copy(update={"attention": kernel}), f"attention: best -> {kernel} ({why})")
