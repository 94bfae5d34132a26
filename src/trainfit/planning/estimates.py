"""Estimates of many recipes: from the cache, else traced by several processes at once.

Two kinds. For ranking, repeated layers and micro-batches are traced a few times, which is fast. An exact one
is the prediction of the recipe as it is; of more than three micro-batches it is continued from two and three,
since each further one adds the same. The parent needs no torch.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from trainfit.catalog.load import gpu as find_gpu
from trainfit.ledger.ledger import Ledger
from trainfit.prediction import cache as ledgers
from trainfit.prediction.calibrated import chosen_file, using
from trainfit.prediction.communication import on_hosts
from trainfit.prediction.device_time import op_s
from trainfit.prediction.estimate import estimate, ledger_of
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.recipe_file import recipe_from
from trainfit.spec.result import Estimate
from trainfit.spec.value import canonical_json
from trainfit.techniques import registry

PARTS = (
    "prediction",
    *(f"catalog/{name}" for name in ("rates.toml", "attention.toml", "links.toml", "calibrations/h200.json")),
    *(f"planning/{name}.py" for name in ("recompute", "assignments", "candidates", "probe")),
)
"""Parts of our code, besides those of ``prediction.cache``, that decide an estimate."""
MAX_KEPT = 4000
PROGRAM = "from trainfit.planning.estimates import serve; serve()"
SERVED = (
    "trainfit.prediction.trace",
    "trainfit.virtual.gpu",
    "trainfit.models.native.decoder",
    "torch.optim",
)
"""Modules that a process imports before its first request."""


class Result(NamedTuple):
    """One recipe's estimate, or why it has none."""

    recipe: Recipe
    """With a budget for recomputation solved."""
    estimate: Estimate | None
    update_s: float = 0.0
    """Seconds of the optimizer's phase on the GPU, part of the step."""
    refused: InputError | None = None


class Request(NamedTuple):
    """A recipe to estimate; with ``recompute: {budget_gib: x}`` the budget is solved first."""

    recipe: Recipe
    exact: bool = True

    @property
    def key(self) -> tuple[str, bool]:
        """Equal for requests with equal results: most recipes are traced alike for both purposes."""
        recipe = self.recipe
        differs = recipe.batch.accumulate > 2 or any(
            one.trace_whole(recipe) for one in registry.in_order() if one.applies(recipe)
        )
        return recipe.id, self.exact and differs


class Estimates:
    """Estimates recipes, several at once.

    Args:
        processes: that trace; 0: this one; None: one a CPU core, at most 4.
        on_progress: called with the number of recipes estimated so far.
    """

    def __init__(
        self,
        processes: int | None = None,
        *,
        use_cache: bool = True,
        on_progress: Callable[[int], None] = lambda count: None,
    ):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.processes = min(4, cores) if processes is None else processes
        self.use_cache, self.on_progress = use_cache, on_progress
        self.count = self.num_traced = 0
        self._known: dict[tuple[str, bool], Result] = {}
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.close()

    def of(self, requests: Sequence[Request]) -> list[Result]:
        """Return the requests' results, in their order."""
        new: list[Request] = []
        for key, each in {each.key: each for each in requests}.items():
            kept = _load(each) if self.use_cache and key not in self._known else None
            if kept is not None:
                self._known[key] = kept
            elif key not in self._known:
                new.append(each)
        # Long ones first, so that no process waits for the last one.
        new.sort(key=lambda each: -_expected_work(each))
        if self.processes == 0 or (len(new) == 1 and not self._workers and "torch" in sys.modules):
            for each in new:
                self._take(each, answer(each, use_cache=self.use_cache))
        elif new:
            self._spread(new)
        self.count = len(self._known)
        self.on_progress(self.count)
        return [self._known[each.key] for each in requests]

    def _take(self, request: Request, result: Result) -> None:
        self.num_traced += 1
        self._known[request.key] = result
        _save(request, result)
        self.on_progress(len(self._known))

    def _spread(self, new: list[Request]) -> None:
        while len(self._workers) < self.processes:
            self._workers.append(_Worker())
        idle = list(self._workers)
        calibration = chosen_file()  # A thread would not see it.

        def run(request: Request) -> Result:
            worker = idle.pop()
            try:
                return worker.ask(request, calibration, use_cache=self.use_cache)
            finally:
                idle.append(worker)

        threads = ThreadPoolExecutor(self.processes)
        try:
            for request, result in zip(new, threads.map(run, new), strict=True):
                self._take(request, result)
        except BaseException:
            for worker in self._workers:
                worker.close()  # So that no thread waits for an answer.
            raise
        finally:
            threads.shutdown(cancel_futures=True)


class _Worker:
    """A process that answers one request after another, a JSON line each way."""

    def __init__(self) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment, start_new_session=True, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def ask(self, request: Request, calibration: str | None, *, use_cache: bool) -> Result:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "opened as a pipe"
        assert stdout is not None, "opened as a pipe"
        data = {"recipe": request.recipe.content(), "exact": request.exact, "use_cache": use_cache}
        data["calibration"] = calibration
        with suppress(BrokenPipeError):
            stdin.write(json.dumps(data) + "\n")
            stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"a process that traces recipes ended with {self._process.wait()}")
        return _read(request.recipe, json.loads(line))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def serve() -> None:
    """Answer requests from standard input until it ends."""
    import importlib

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print is no answer.
    for name in SERVED:
        importlib.import_module(name)
    for line in sys.stdin:
        data = json.loads(line)
        request = Request(recipe_from(data["recipe"]), data["exact"])
        with using(data["calibration"]):
            result = answer(request, use_cache=data["use_cache"])
        answers.write(json.dumps(_written(result)) + "\n")
        answers.flush()


def answer(request: Request, *, use_cache: bool = True) -> Result:
    """Return the result of one request, traced in this process."""
    recipe = request.recipe
    try:
        if recipe.plans_recompute:
            from trainfit.planning.recompute import plan

            recipe = plan(recipe).recipe
        return _exact(recipe, use_cache) if request.exact else _for_ranking(recipe, use_cache)
    except InputError as error:
        return Result(recipe, None, refused=error)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        problem = f"cannot be traced ({type(error).__name__}: {str(error)[:200]})"
        return Result(recipe, None, refused=InputError(problem, "please report it"))


def _exact(recipe: Recipe, use_cache: bool) -> Result:
    if recipe.batch.accumulate <= 3:
        found, update_s = _traced(recipe, recipe.batch.accumulate, use_cache)
        return Result(recipe, found, update_s)
    two, update_s = _traced(recipe, 2, use_cache)
    three, _ = _traced(recipe, 3, use_cache)
    return Result(recipe, _continued(recipe, two, three), update_s)


def _for_ranking(recipe: Recipe, use_cache: bool) -> Result:
    accumulate = recipe.batch.accumulate
    found, update_s = _traced(recipe, min(2, accumulate), use_cache, shorten=True)
    if accumulate > 2 and found.step_s:
        share = 1 + max(0.0, found.step_s - update_s) / 2 / found.step_s
        found = _continued(recipe, found, _scaled(found, share))
    return Result(recipe, found.model_copy(update={"recipe_id": recipe.id}), update_s)


def _traced(
    recipe: Recipe, accumulate: int, use_cache: bool, *, shorten: bool = False
) -> tuple[Estimate, float]:
    gpu = find_gpu(recipe.hardware.gpu)
    batch = recipe.batch.model_copy(update={"accumulate": accumulate})
    traced = recipe.model_copy(update={"batch": batch})
    ledger = ledger_of(traced, use_cache=use_cache, shorten=shorten)
    return estimate(traced, gpu, ledger), _update_s(ledger, recipe)


def _update_s(ledger: Ledger, recipe: Recipe) -> float:
    gpu = on_hosts(find_gpu(recipe.hardware.gpu), recipe.hardware)
    if gpu.memory_bytes_per_s is None:
        return 0.0
    updates = (op for op in ledger.steady_ops if ledger.segments[op.segment].phase == "optimizer")
    return sum(ledger.times(op) * op_s(op, gpu) for op in updates)


LINEAR = ("model_flops", "hardware_flops", "step_s")


def _scaled(found: Estimate, factor: float) -> Estimate:
    """Return an estimate with what a step adds up multiplied."""
    time = found.time and found.time.model_copy(update={name: value * factor for name, value in found.time})
    traffic = tuple(
        one.model_copy(
            update={"calls": round(one.calls * factor), "bytes_sent": round(one.bytes_sent * factor)}
        )
        for one in found.traffic
    )
    sums = {name: getattr(found, name) * factor for name in LINEAR if getattr(found, name) is not None}
    return found.model_copy(update={**sums, "time": time, "traffic": traffic})


def _continued(recipe: Recipe, two: Estimate, three: Estimate) -> Estimate:
    """Return the estimate of ``accumulate`` micro-batches from those of two and three: each adds the same.

    Memory is that of three: nothing more is kept from one micro-batch to the next.
    """
    more = recipe.batch.accumulate - 3
    if two.step_s is None or three.step_s is None or three.time is None or two.time is None:
        return three.model_copy(update={"recipe_id": recipe.id})

    def on(before: float, after: float) -> float:
        return max(0.0, after + more * (after - before))

    step_s = on(two.step_s, three.step_s)
    model_flops = on(two.model_flops, three.model_flops)
    before = dict(two.time)
    times = {name: on(before[name], value) for name, value in three.time}
    traffic = tuple(
        last.model_copy(
            update={
                name: round(on(getattr(first, name), getattr(last, name))) for name in ("calls", "bytes_sent")
            }
        )
        for first, last in zip(two.traffic, three.traffic, strict=True)
    )
    tokens = recipe.batch.tokens * recipe.mesh.data_ranks
    tokens_per_s = tokens / step_s
    faster = step_s / three.step_s
    hardware_flops = on(two.hardware_flops, three.hardware_flops)
    cost = three.cost
    if cost is not None:
        cost = cost.model_copy(update={"per_million_tokens": cost.per_hour / 3600 / tokens_per_s * 1e6})
    bounds = {
        name: one.model_copy(update={"low": one.low * faster, "high": one.high * faster})
        for name, one in three.bounds.items()
    }
    shares = {
        name: share and share * flops / before_flops / faster
        for name, share, flops, before_flops in (
            ("mfu", three.mfu, model_flops, three.model_flops),
            ("hfu", three.hfu, hardware_flops, three.hardware_flops),
        )
    }
    note = f"{recipe.batch.accumulate} micro-batches continued from two and three, each adding the same"
    return three.model_copy(
        update={
            "recipe_id": recipe.id, "step_s": step_s, "time": three.time.model_copy(update=times),
            "model_flops": model_flops, "hardware_flops": hardware_flops, "tokens_per_s": tokens_per_s,
            "traffic": traffic, "cost": cost, "bounds": bounds, **shares,
            "assumptions": (*three.assumptions, note),
        }
    )  # fmt: skip


def _expected_work(request: Request) -> int:
    recipe = request.recipe
    slow = 8 * bool(recipe.compile) + 3 * recipe.plans_recompute
    return slow + min(3, recipe.batch.accumulate) + bool(recipe.hardware.count > 1 and request.exact)


def _written(result: Result) -> dict[str, Any]:
    if result.refused is not None:
        error = result.refused
        value = error.value if isinstance(error.value, str | int | float | bool) else None
        fields = {"problem": error.problem, "remedy": error.remedy, "field": error.field, "value": value}
        return {"refused": fields}
    assert result.estimate is not None
    estimated = result.estimate.model_dump(mode="json")
    return {"recipe": result.recipe.content(), "estimate": estimated, "update_s": result.update_s}


def _read(recipe: Recipe, data: dict[str, Any]) -> Result:
    if "refused" in data:
        return Result(recipe, None, refused=InputError(**data["refused"]))
    found = Estimate.model_validate_json(json.dumps(data["estimate"]))
    return Result(recipe_from(data["recipe"]), found, data["update_s"])


@cache
def _version() -> str:
    digest = hashlib.sha256(ledgers.code_version().encode())
    for part in PARTS:
        place = Path(__file__).parents[1] / part
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _path(request: Request) -> Path:
    allocator = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    file = chosen_file()
    calibration = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    parts = [
        ledgers.key(request.recipe), request.recipe.content(), request.key, _version(), allocator, calibration
    ]  # fmt: skip
    name = hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:32]
    return ledgers.folder() / "estimates" / f"{name}.json"


def _load(request: Request) -> Result | None:
    try:
        return _read(request.recipe, json.loads(_path(request).read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # Not kept, or damaged: it is estimated again.


def _save(request: Request, result: Result) -> None:
    path = _path(request)
    with suppress(OSError):  # A cache that cannot be written is not an error.
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(_written(result)), "utf-8")
        part.replace(path)
