"""Estimates of many recipes: kept ones, else traced by several processes at once (answer.py).

The parent needs no torch.
"""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from trainfit.planning.answer import Request, Result, answer, continued_result
from trainfit.planning.kept_estimates import FOLDER, load, read, save, written
from trainfit.planning.room import Room
from trainfit.planning.workers import CAN_FORK, Answer, KilledError, Workers
from trainfit.prediction import cache as ledgers
from trainfit.prediction.time.calibrated import OwnCalibration, calibration_from
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe

MAX_KEPT = 4000
ANSWERS = "trainfit.planning.estimates:answers"
NUM_AHEAD = 3
"""Recipes that are traced ahead at once, where none is compiled."""
IMPORTS = (
    "trainfit.prediction.trace",
    "trainfit.virtual.gpu",
    "trainfit.models.native.decoder",
    "torch.optim",
    "torch.fx.experimental.symbolic_shapes",
    "torch.utils.flop_counter",
    "transformers.models.llama.configuration_llama",
    "transformers.models.auto.modeling_auto",
)
"""Modules that every trace needs."""
SEVERAL_GPUS_IMPORTS = ("trainfit.prediction.several_ranks", "torch.distributed.fsdp")
COMPILER_IMPORTS = (
    "torch._dynamo.repro.after_dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.fx_passes.fuse_attention",
    "sympy.physics.units",
)


class Estimates:
    """Estimates recipes, several at once.

    Args:
        processes: that trace; 0: this one; None: one a CPU core, at most 4.
        calibration: the user's, for every recipe; None: the catalog's.
        on_progress: called with the number of recipes estimated so far.
    """

    def __init__(
        self,
        processes: int | None = None,
        *,
        calibration: OwnCalibration | None = None,
        use_cache: bool = True,
        on_progress: Callable[[int], None] = lambda count: None,
    ):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.processes = min(4, cores) if processes is None else processes
        self.calibration, self.use_cache, self.on_progress = calibration, use_cache, on_progress
        self.count = self.num_traced = 0
        self._known: dict[tuple[str, bool], Result] = {}
        self.later: list[Recipe] = []
        """Recipes whose like may be requested later: what their traces import is imported meanwhile."""
        self.room = Room()
        """Limits the traces at once, of all processes, by free memory."""
        self._workers: dict[bool, Workers] = {}
        """Processes for recipes that are not compiled and for those that are."""
        self._futures: dict[tuple[str, bool], Future[dict[str, Any]]] = {}
        """Answers of processes, by request; some were begun ahead."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._close()
        if self.num_traced:
            with suppress(OSError):
                ledgers.evict(f"{FOLDER}/*.json", MAX_KEPT)

    def of(self, requests: Sequence[Request], ahead: Sequence[Request] = ()) -> list[Result]:
        """Return the requests' results, in their order.

        Args:
            ahead: what is likely to be requested next, and is begun meanwhile by processes that are idle.
        """
        new = self._unknown(requests)
        # Long ones first, so that no process waits for the last one.
        parts = sorted(
            self._unknown([part for each in new for part in each.parts]),
            key=lambda each: -_expected_work(each),
        )
        if self.processes == 0 or (len(new) == 1 and not self._workers and "torch" in sys.modules):
            for each in parts:
                self._take(each, answer(each, self.calibration, use_cache=self.use_cache))
        elif parts:
            self._start([each.recipe for each in parts])
            try:
                futures = [self._submit(each) for each in parts]
                for each in self._unknown(ahead) if self.processes > 1 else ():
                    self._submit(each, ahead=True)
                for each, one in zip(parts, futures, strict=True):
                    self._take(each, _result(each.recipe, one))
            except BaseException:
                self._close()
                raise
        for each in new:
            if len(each.parts) > 1:
                self._take(
                    each, continued_result(each.recipe, *(self._known[part.key] for part in each.parts))
                )
        self.count = len(self._known)
        self.on_progress(self.count)
        return [self._known[each.key] for each in requests]

    def _unknown(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests that neither this object nor the cache knows, each once."""
        new = {each.key: each for each in requests if each.key not in self._known}
        for key, each in list(new.items()) if self.use_cache else ():
            if (kept := load(each, self.calibration)) is not None:
                self._known[key] = kept
                del new[key]
        return list(new.values())

    def _take(self, request: Request, result: Result) -> None:
        self.num_traced += 1
        self._known[request.key] = result
        if result.is_complete:
            save(request, self.calibration, result)
        self.on_progress(len(self._known))

    def _submit(self, request: Request, *, ahead: bool = False) -> Future[dict[str, Any]]:
        """Give a request to the processes of its kind, if they have not got it.

        One that still waits for a process of a lower priority goes to the others.
        """
        workers = self._workers.get(bool(request.recipe.compile)) or self._workers[False]
        given = self._futures.get(request.key)
        if given is None or (not ahead and workers.num_ahead and given.cancel()):
            data = {"recipe": request.recipe.content(), "exact": request.exact}
            self._futures[request.key] = workers.ask(data, ahead=ahead)
        return self._futures[request.key]

    def _start(self, recipes: list[Recipe]) -> None:
        """Start processes for recipes, those that are compiled in processes of their own."""
        groups = {False: recipes}
        if CAN_FORK and self.processes > 1:
            several = [*recipes, *self.later]
            groups = {kind: [one for one in several if bool(one.compile) == kind] for kind in (False, True)}
        for kind, some in groups.items():
            if some and kind not in self._workers:
                imports = dict.fromkeys(module for one in some for module in _imports(one))
                # Compiled ones take longest: those ahead have the priority of all others.
                num_ahead = 0 if kind or self.processes < 2 else NUM_AHEAD
                self._workers[kind] = Workers(
                    self.processes, ANSWERS, list(imports), num_ahead, shared=self._shared(), room=self.room
                )

    def _shared(self) -> dict[str, Any]:
        """Return what is the same for every request to a process."""
        own = self.calibration
        calibration = None if own is None else {"file": own.file, "text": own.text}
        return {"use_cache": self.use_cache, "calibration": calibration}

    def _close(self) -> None:
        for workers in self._workers.values():
            workers.close()


def _result(recipe: Recipe, given: Future[dict[str, Any]]) -> Result:
    """Return a process's result; of one that was killed twice, a refusal."""
    try:
        return read(recipe, given.result())
    except KilledError:
        problem = "the process that traced it was killed twice, most likely for want of the host's memory"
        return Result(
            recipe, None, refused=InputError(problem, "plan it where more is free"), is_complete=False
        )


def _imports(recipe: Recipe) -> Sequence[str]:
    """Return the modules that a trace of the recipe needs."""
    several = SEVERAL_GPUS_IMPORTS if recipe.hardware.count > 1 else ()
    compiler = COMPILER_IMPORTS if recipe.compile else ()
    return *IMPORTS, *several, *compiler, *(("torchao.float8",) if recipe.precision == "fp8" else ())


def answers(shared: dict[str, Any]) -> Answer:
    """Return a process's answer to a request, both as plain data; ``shared``: as ``Estimates`` writes it."""
    given = shared["calibration"]
    calibration = None if given is None else calibration_from(**given)

    def answered(data: dict[str, Any]) -> dict[str, Any]:
        request = Request(recipe_from(data["recipe"]), data["exact"])
        return written(answer(request, calibration, use_cache=shared["use_cache"]))

    return answered


def _expected_work(request: Request) -> int:
    recipe = request.recipe
    slow = 8 * bool(recipe.compile) + 3 * recipe.plans_recompute + 2 * recipe.offload.weights
    return slow + min(3, recipe.batch.accumulate) + bool(recipe.hardware.count > 1 and request.exact)
