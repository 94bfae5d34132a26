"""Tables and figures of evidence/pages/reinforcement-learning.md."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from evidence.scripts.tables.joined import RESULTS
from trainfit.catalog.load import gpu, model_config
from trainfit.flops.closed_form import product_step_flops
from trainfit.prediction.time.peaks import peak_flops_per_s
from trainfit.records import Record, read_jsonl
from trainfit.report.table import markdown_grid
from trainfit.spec.objective import Policy
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate, Loop, LoopTime, Measurement
from trainfit.spec.units import GIB

FOLDER = RESULTS / "rl-phases"
NOT_MEASURED = "Not measured yet."
PHASES = ("rollout", "scoring", "update")
WITH_GATHERED = "32f824a1"
"""Commit whose peak of scoring, under FSDP2, was read from before a rollout's gathered weights were freed."""


class Pair(NamedTuple):
    """A recipe's loop, predicted and measured."""

    record: Record
    predicted: Estimate
    measured: Measurement
    commit: str
    """Of the measurement."""

    def loops(self) -> tuple[Loop, Loop]:
        """Return the predicted and the measured loop."""
        assert self.predicted.loop is not None
        assert self.measured.loop is not None
        return self.predicted.loop, self.measured.loop

    def peaks(self) -> dict[str, tuple[int, int]]:
        """Return the predicted and the measured allocated peak of each phase, bytes."""
        ours, theirs = ({one.phase: one.peak_allocated_bytes for one in loop.memory} for loop in self.loops())
        return {phase: (ours[phase], theirs[phase]) for phase in self._phases()}

    def _phases(self) -> tuple[str, ...]:
        gathered = self.recipe.hardware.count > 1 and self.commit.startswith(WITH_GATHERED)
        return tuple(phase for phase in PHASES if not (gathered and phase == "scoring"))

    def peak_error(self) -> float:
        """Return the largest error of a phase's peak, over the measured one."""
        return max((ours / theirs - 1 for ours, theirs in self.peaks().values()), key=abs)

    def seconds(self) -> tuple[float, float] | None:
        """Return the predicted and the measured seconds of a loop of the longest completions."""
        ours, theirs = (loop.longest for loop in self.loops())
        return (ours.seconds, theirs.seconds) if ours and theirs else None

    def time_error(self) -> float | None:
        """Return the error of a loop's time, over the measured one."""
        found = self.seconds()
        return found[0] / found[1] - 1 if found else None

    @property
    def model(self) -> str:
        """The model's name in the catalog."""
        return str(self.record.recipe["model"]["config"])

    @property
    def recipe(self) -> Recipe:
        """The recipe, as it is read now."""
        return recipe_from(self.record.recipe)

    def trains(self) -> str:
        """Return what trains, in words."""
        return _trains(self.recipe)


def _trains(recipe: Recipe) -> str:
    if recipe.adapter is None:
        return "all weights"
    return "LoRA" if recipe.quantize is None else f"LoRA on {recipe.quantize}"


@cache
def pairs(name: str) -> tuple[Pair, ...]:
    """Return the recipes of ``NAME-predicted.jsonl`` that were measured, in their order."""
    measured_file = FOLDER / f"{name}-measured.jsonl"
    if not measured_file.exists():
        return ()
    measured = {one.recipe_id: one for one in read_jsonl(measured_file)}
    found = list[Pair]()
    for one in read_jsonl(FOLDER / f"{name}-predicted.jsonl"):
        other = measured.get(one.recipe_id)
        if one.estimate is not None and other is not None and other.measurement is not None:
            found.append(Pair(one, one.estimate, other.measurement, other.commit or ""))
    return tuple(found)


def settings() -> tuple[Pair, ...]:
    """Return the loops on one and two GPUs that ran to their end."""
    every = (*pairs("one-gpu"), *pairs("two-gpus"), *pairs("updates-14b-h100"), *pairs("updates-14b-h200"))
    return tuple(one for one in every if one.measured.loop is not None)


def peaks() -> str:
    """Return the peaks of the phases of each setting, measured, with the errors of the predictions."""
    rows = []
    for one in settings():
        recipe = one.recipe
        policy = recipe.objective
        assert isinstance(policy, Policy)
        found = one.peaks()
        cells = [_gib(*found[phase]) if phase in found else "not read" for phase in PHASES]
        rows.append((
            one.model, str(recipe.hardware.count), one.trains(), one.record.recipe["recompute"],
            f"{policy.prompts} x {policy.group}", f"{recipe.batch.micro} x {recipe.batch.seq}", *cells,
        ))  # fmt: skip
    heads = ("model", "GPUs", "trains", "recomputed", "completions", "micro-batch", *PHASES)
    return markdown_grid(heads, rows, 4) if rows else NOT_MEASURED


def _gib(predicted: int, measured: int) -> str:
    return f"{measured / GIB:.2f} ({predicted / measured - 1:+.2%})"


def times() -> str:
    """Return the seconds of each setting's loop, measured and predicted, with those of its parts."""
    rows = []
    for one in settings():
        recipe, found = one.recipe, one.seconds()
        ours, theirs = (loop.longest for loop in one.loops())
        if found is None or ours is None or theirs is None:
            continue
        of_parts = {part.name: part.seconds for part in ours.parts}
        parts = {part.name: part.seconds for part in theirs.parts}
        cells = [
            f"{parts[name]:.2f} ({of_parts[name]:.2f})" if name in parts and name in of_parts else "-"
            for name in ("prefill", "decode", "scoring", "reference", "update")
        ]
        rows.append((
            one.model, str(recipe.hardware.count), one.trains(), f"{found[1]:.2f}",
            f"{found[0] / found[1] - 1:+.1%}", *cells,
        ))  # fmt: skip
    parts = ("prefill", "decode", "scoring", "reference", "update")
    heads = ("model", "GPUs", "trains", "loop, s", "predicted", *parts)
    return markdown_grid(heads, rows, 3) if rows else NOT_MEASURED


def summary() -> str:
    """Return the largest errors in one sentence."""
    found = settings()
    errors = [error for one in found if (error := one.time_error()) is not None]
    if not found or not errors:
        return NOT_MEASURED
    worst = max((one.peak_error() for one in found), key=abs)
    within = sum(abs(error) <= 0.1 for error in errors)
    return (
        f"Of {len(found)} settings the largest error of a phase's peak is {worst:+.2%}; a loop's time is "
        f"within 10 % in {within} of {len(errors)}, and {max(errors, key=abs):+.1%} at the worst."
    )


def updates() -> str:
    """Return one update of 14B on two GPUs, of a policy and of training on data, measured and predicted."""
    rows = []
    for one in (*pairs("updates-14b-h100"), *pairs("updates-14b-h200")):
        measured, predicted, recipe = one.measured, one.predicted, one.recipe
        if measured.step_s is None or predicted.step_s is None or predicted.mfu is None:
            continue
        longer = predicted.step_s / measured.step_s
        assert predicted.hfu is not None
        rows.append((
            recipe.hardware.gpu[:4].upper(), recipe.objective.name, one.trains(),
            one.record.recipe["recompute"], recipe.loss, f"{recipe.batch.micro} x {recipe.batch.seq}",
            f"{measured.step_s:.2f} ({longer - 1:+.1%})",
            f"{measured.tokens_per_s or 0.0:,.0f}", f"{predicted.mfu * longer:.1%}",
            f"{predicted.hfu * longer:.1%}", _as_full_training(one), _share(measured.busy),
            _share(measured.memory_access),
        ))  # fmt: skip
    heads = (
        "GPUs", "objective", "trains", "recomputed", "loss", "micro-batch", "an update, s", "tokens/s", "MFU",
        "HFU", "both by 6N", "busy", "memory access",
    )  # fmt: skip
    return markdown_grid(heads, rows, 6) if rows else NOT_MEASURED


def _as_full_training(one: Pair) -> str:
    """Return MFU and HFU as if every weight were trained, from the measured time."""
    recipe, step_s = one.recipe, one.measured.step_s
    assert step_s
    name = recipe.hardware.gpu
    assert name is not None
    peak = peak_flops_per_s(gpu(name), "bf16") * recipe.hardware.count
    counted = product_step_flops(
        model_config(one.model), seq=recipe.batch.seq,
        batch=recipe.batch.micro * recipe.batch.accumulate * recipe.hardware.count,
        recomputed="full" if recipe.recompute == "full" else "none",
    )  # fmt: skip
    shares = [flops / step_s / peak for flops in (counted.model_flops, counted.hardware_flops)]
    return ", ".join(f"{share:.1%}" for share in shares)


def own_lengths() -> tuple[tuple[str, str, LoopTime, LoopTime], ...]:
    """Return model, what trains, and a loop with a run's own lengths, predicted and measured by that run."""
    found = []
    for one in read_jsonl(FOLDER / "own-lengths.jsonl"):
        assert one.estimate is not None
        loop = one.estimate.loop
        assert loop is not None
        assert loop.expected is not None
        assert loop.recorded is not None
        recipe = recipe_from(one.recipe)
        found.append((str(one.recipe["model"]["config"]), _trains(recipe), loop.expected, loop.recorded))
    return tuple(found)


def lengths() -> str:
    """Return the seconds of loops with lengths of their own, measured, with the errors of the predictions."""
    rows = []
    for model, trains, ours, theirs in own_lengths():
        scoring, update = (
            tuple(next(part.seconds for part in time.parts if part.name == name) for time in (ours, theirs))
            for name in ("scoring", "update")
        )
        whole = (ours.seconds, theirs.seconds)
        rollout = tuple(a - b - c for a, b, c in zip(whole, scoring, update, strict=True))
        cells = [f"{b:.2f} ({a / b - 1:+.1%})" for a, b in (whole, rollout, scoring, update)]
        rows.append((model, trains, f"{theirs.mean_new:.1f}", *cells))
    heads = ("model", "trains", "tokens of a completion", "loop, s", "rollout", "scoring", "update")
    return markdown_grid(heads, rows, 2)


def utilisation() -> str:
    """Return time, busy %, memory access and MFU of the parts of a loop of LoRA on 14B in nf4."""
    for one in pairs("updates-14b-h100"):
        if one.recipe.adapter is None or one.measured.loop is None:
            continue
        ours, theirs = (loop.longest for loop in one.loops())
        if ours is None or theirs is None:
            continue
        predicted = {part.name: part for part in ours.parts}
        rows = []
        for part in theirs.parts:
            of_part = predicted[part.name]
            if of_part.mfu is None or of_part.hfu is None or theirs.share(part) < 0.05:
                continue
            longer = of_part.seconds / part.seconds
            rows.append((
                part.name, f"{theirs.share(part):.0%}", _share(part.busy), _share(part.memory_access),
                f"{of_part.mfu * longer:.1%}", f"{of_part.hfu * longer:.1%}",
            ))  # fmt: skip
        return markdown_grid(("part", "of the time", "busy", "memory access", "MFU", "HFU"), rows, 1)
    return NOT_MEASURED


def preferences() -> str:
    """Return peak and time of steps of DPO, measured, with the errors of the predictions."""
    rows = []
    for one in (*pairs("preferences-one-gpu"), *pairs("preferences-two-gpus")):
        recipe, step_s, peak = one.recipe, one.measured.step_s, one.measured.peak_allocated_bytes
        if step_s is None or peak is None or one.predicted.step_s is None:
            continue
        rate = one.measured.tokens_per_s or 0.0
        rows.append((
            one.model, str(recipe.hardware.count), one.trains(), one.record.recipe["recompute"],
            f"{recipe.batch.micro} x {recipe.batch.seq}", _gib(one.predicted.peak_allocated_bytes, peak),
            f"{step_s:.3f} ({one.predicted.step_s / step_s - 1:+.1%})", f"{rate:,.0f}",
        ))  # fmt: skip
    heads = ("model", "GPUs", "trains", "recomputed", "pairs", "peak, GiB", "a step, s", "tokens/s")
    return markdown_grid(heads, rows, 4) if rows else NOT_MEASURED


def frontier() -> str:
    """Return the peak of loops by batch and length, predicted and measured."""
    rows = []
    for one in sorted(pairs("frontier"), key=_size):
        recipe = one.recipe
        policy = recipe.objective
        assert isinstance(policy, Policy)
        measured, predicted = one.measured.peak_allocated_bytes, one.predicted.peak_allocated_bytes
        if one.measured.status == "out-of-memory":
            cell = f"out of memory ({predicted / GIB:.2f} predicted)"
        else:
            cell = NOT_MEASURED if measured is None else _gib(predicted, measured)
        rows.append((
            one.model, f"{policy.prompts} x {policy.group}", f"{policy.max_prompt} + {policy.max_new}",
            str(policy.rollout.batch), str(recipe.batch.micro), cell, "yes" if one.predicted.fits else "no",
        ))  # fmt: skip
    heads = ("model", "completions", "prompt + new", "at a time", "micro-batch", "peak, GiB", "fits")
    return markdown_grid(heads, rows, 2) if rows else NOT_MEASURED


def _size(pair: Pair) -> tuple[str, int, int, int]:
    policy = pair.recipe.objective
    assert isinstance(policy, Policy)
    return (pair.model, policy.completions, policy.max_new, pair.recipe.batch.micro)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
