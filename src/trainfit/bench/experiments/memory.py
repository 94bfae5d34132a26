"""``memory``: phases and timeline of the 2.7B model, forward only and a whole step, measured and predicted.

On CUDA the peaks are the caching allocator's, of steps that run unobserved; one more step, in which every
storage is tracked, gives the timeline and what holds the peak. On a CPU the tracked step gives both.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from trainfit.bench.harness.bench import Bench, Failure, Point, failure_of, failures, fp32_products, value
from trainfit.bench.harness.experiment import Column, Experiment, Plot
from trainfit.bench.harness.memory_measure import (
    Measured,
    allocated,
    forward_only,
    measure,
    start_afresh,
    whole_step,
)
from trainfit.bench.harness.memory_prediction import (
    FORWARD_ONLY,
    WHOLE_STEP,
    Prediction,
    RunMemory,
    predict_memory,
    predictions,
)
from trainfit.bench.harness.memory_timeline import BEFORE, Piece
from trainfit.bench.workloads.steps import PRECISIONS, native_recipe
from trainfit.catalog.names import CPU
from trainfit.models.native.decoder import NativeDecoder
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import PHASES
from trainfit.spec.units import GB, MB, MIB
from trainfit.step import assemble

MODEL = {"tiny": "tiny-llama-demo", "full": "2.7b"}
BATCH = {"tiny": 1, "full": 4}
CASES: dict[str, tuple[tuple[str, int], ...]] = {
    "tiny": (("eager", 64),),
    "full": (("eager", 512), ("eager", 128), ("eager", 256), ("sdpa", 2048), ("eager", 2048)),
}
"""Attention and context, the most important first. Written out, 2048 tokens need more memory than a GPU
has."""
DETAILED = {64, 512}  # Contexts whose largest holders are listed, and whose snapshots are written
MODES = ("fp32", "amp-bf16")
SOURCES = ("measured", "predicted")
NUM_HOLDERS = 5


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield both precisions of each case: forward only, then whole steps, of one model."""
    if bench.folder is not None and bench.device.type != "cuda":
        why = "snapshots are of CUDA's allocator"
        raise InputError(why, "leave it out", field="files", value=str(bench.folder))
    points: list[Point] = [
        {"model": MODEL[bench.form], "attention": attention, "context": context, "precision": mode}
        for attention, context in CASES[bench.form]
        for mode in MODES
    ]
    points = [point for point in points if bench.wanted(points_of(point))]
    recipes = [recipe_of(bench, point) for point in points]
    to_predict = [recipe_of(bench, point) for point in points if bench.wanted(points_of(point, "predicted"))]
    ahead = to_predict if bench.gpu and not bench.late() else ()
    with predictions(ahead, bench.device, predict_memory) as predict:
        for point, recipe in zip(points, recipes, strict=True):
            with fp32_products("fp32"):
                yield from _rows(bench, point, recipe, predict)
            bench.tidy()


def points_of(point: Point, *sources: str) -> list[Point]:
    """Return the points of a case's rows, of some sources or of both."""
    kinds = (WHOLE_STEP, FORWARD_ONLY)
    return [{**point, "pass": kind, "source": source} for kind in kinds for source in sources or SOURCES]


def recipe_of(bench: Bench, point: Point) -> Recipe:
    """Return the recipe of one point, on this device."""
    unknown = "h200" if bench.device.type == "cuda" else CPU
    return native_recipe(
        str(point["model"]), PRECISIONS[str(point["precision"])], BATCH[bench.form], int(point["context"]),
        bench.device, attention=point["attention"],
        hardware={"gpu": bench.gpu.name if bench.gpu else unknown},
    )  # fmt: skip


def _rows(
    bench: Bench, point: Point, recipe: Recipe, predict: Callable[[Recipe], Prediction]
) -> Iterator[BenchRow]:
    if (late := bench.late()) is not None:
        yield from failures(bench.wanted(points_of(point)), *late)
        return
    measured, residual = _measured(bench, point, recipe)
    predicted = _predicted(bench, point, recipe, predict)
    for at in bench.wanted(points_of(point)):
        found = measured.get(str(at["pass"]))
        source = found if at["source"] == "measured" else predicted
        if isinstance(source, tuple):
            yield from failures([at], *source)
        elif isinstance(source, Measured):
            yield _row(at, source.memory)
        elif source is not None:
            reference = found.memory if isinstance(found, Measured) else None
            yield _row(at, source[str(at["pass"])], reference)
    for kind, found in measured.items():
        if isinstance(found, Measured) and point["context"] in DETAILED:
            yield from holder_rows({**point, "peak of": kind}, found.at_peak)
    if residual is not None:
        yield _residual_row(point, recipe, residual)


def _predicted(
    bench: Bench, point: Point, recipe: Recipe, predict: Callable[[Recipe], Prediction]
) -> Prediction | Failure | None:
    """Return the prediction or a failure; None where it is not selected."""
    if not bench.wanted(points_of(point, "predicted")):
        return None
    if bench.gpu is None and bench.device.type == "cuda":
        return ("refused", "the catalog does not have this GPU")
    try:
        return predict(recipe)
    except Exception as error:  # Any error is this point's result.
        return failure_of(error)


def _measured(
    bench: Bench, point: Point, recipe: Recipe
) -> tuple[dict[str, Measured | Failure], torch.Tensor | None]:
    """Return each selected kind of run, measured or failed, and the residual stream's tensor on ``meta``."""
    rows = bench.wanted(points_of(point, "measured"))
    kinds = [kind for kind in (FORWARD_ONLY, WHOLE_STEP) if any(row["pass"] == kind for row in rows)]
    if not kinds:
        return {}, None
    found: dict[str, Measured | Failure] = {}
    seen: list[torch.Tensor] = []
    held = start_afresh(bench)
    try:
        step = assemble(recipe, bench.device)
        built = allocated(bench.device) - held
        batches = step.random_batches()
        runs = {FORWARD_ONLY: forward_only, WHOLE_STEP: whole_step}
        assert isinstance(step.model, NativeDecoder)
        last = step.model.layers[-1]
        hook = last.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].to("meta")))
        for kind in kinds:
            once = partial(runs[kind], step, batches)
            found[kind] = measure(bench, step, batches, once, built, held, snapshot_name(point, kind))
            hook.remove()
    except Exception as error:  # Any error is the result of what is not measured yet.
        found = dict.fromkeys(kinds, failure_of(error)) | found
    return found, seen[0] if seen else None


def snapshot_name(point: Point, kind: str) -> str:
    """Return the file name of a detailed point's snapshot; empty: it has none."""
    if point["context"] not in DETAILED:
        return ""
    return "memory-{model}-{precision}-{context}-".format(**point) + f"{kind.replace(' ', '-')}.pickle"


def _row(point: Point, found: RunMemory, measured: RunMemory | None = None) -> BenchRow:
    """Return the peaks of one source; of a prediction also whether it fits, and its errors."""
    peak = max(found.phases.values())
    numbers: dict[str, Cell] = {"before_bytes": found.before}
    numbers |= {f"{phase}_bytes": size for phase, size in found.phases.items()}
    numbers |= {"peak_bytes": peak, "first_peak_bytes": found.first}
    if point["source"] == "predicted":
        numbers["fits"] = found.fits
    if measured is not None:
        numbers["error"] = f"{peak / max(measured.phases.values()) - 1:+.2%}"
        numbers["off_by"] = f"{peak - max(measured.phases.values()):+,} bytes"
        numbers["phase_off_by"] = largest_difference(found, measured)
    return value(point, **numbers).model_copy(update={"curve": found.curve})


def largest_difference(found: RunMemory, measured: RunMemory) -> str:
    """Return the largest error of a phase's peak, or of the bytes before the run, and that phase."""
    one, other = ({"before": run.before, **run.phases} for run in (found, measured))
    apart = {phase: one[phase] - size for phase, size in other.items()}
    worst = max(apart, key=lambda phase: abs(apart[phase]))
    return f"{apart[worst]:+,} bytes ({worst})" if apart[worst] else "+0 bytes"


def holder_rows(point: Point, alive: list[Piece]) -> Iterator[BenchRow]:
    """Yield what the run allocated and holds at its peak, by the line that allocated it, largest first."""
    groups: dict[tuple[str, str], list[Piece]] = {}
    for piece in alive:
        if piece.phase != BEFORE:
            op = piece.op.removeprefix("aten.").removesuffix(".default")
            groups.setdefault((piece.where, op), []).append(piece)
    largest = sorted(groups.items(), key=lambda item: -_total(item[1]))[:NUM_HOLDERS]
    for (where, op), pieces in largest:
        yield value(
            {**point, "made at": where, "operation": op}, category=pieces[0].category, count=len(pieces),
            largest_bytes=max(piece.num_bytes for piece in pieces), together_bytes=_total(pieces),
        )  # fmt: skip


def _total(pieces: list[Piece]) -> int:
    return sum(piece.num_bytes for piece in pieces)


def _residual_row(point: Point, recipe: Recipe, residual: torch.Tensor) -> BenchRow:
    """Return the size of the residual stream at the last block: batch x context x d_model x itemsize."""
    batch, context, width = residual.shape
    assert (batch, context) == (recipe.batch.micro, recipe.batch.seq)
    size = residual.nbytes
    return value(
        {**point, "tensor": "residual stream"}, dtype=str(residual.dtype).removeprefix("torch."),
        shape=f"{batch} x {context} x {width}", bytes=size, MiB=size / MIB, MB=size / MB, GB=size / GB,
    )  # fmt: skip


EXPERIMENT = Experiment(
    title="Memory through a step",
    question="How much memory does a step hold over time, measured and predicted?",
    run=run,
    limit_s=100,
    files="snapshots of detailed points for pytorch.org/memory_viz (CUDA)",
    columns=(
        Column("before_bytes", note="the built model, before any step"),
        *(Column(f"{phase}_bytes") for phase in PHASES),
        Column("peak_bytes"),
        Column("first_peak_bytes", note="peak of the very first step; the other columns are of a later one"),
        Column("fits", note="whether the prediction fits into this device"),
        Column("error", note="of the predicted peak, relative to the measured one"),
        Column("off_by", note="the predicted peak minus the measured one"),
        Column("phase_off_by", note="the same of the phase with the largest difference"),
        Column("category"),
        Column("count"),
        Column("largest_bytes"),
        Column("together_bytes"),
        Column("made at", note="line of the model that allocated it; in the backward the autograd node"),
        Column("bytes", format=",.0f"),
    ),
    plots=(
        Plot(
            x=(), y="curve", panels=("attention", "context", "precision", "source"),
            where={"pass": (WHOLE_STEP,)},
            order={"attention": (), "context": (), "precision": MODES,
                   "source": ("predicted", "measured")},
            title="Memory through a whole step, by category",
        ),
    ),
)  # fmt: skip
