"""The estimate of one recipe of a plan, traced in this process.

Two kinds. For ranking, repeated layers and micro-batches are traced a few times, which is fast. An exact one
is the prediction of the recipe as it is; of more than three micro-batches it is continued from two and three,
since each further one adds the same. A pipeline is predicted as it is for both, since micro-batches fill it.
"""

import math
from typing import NamedTuple

from trainfit.ledger.ledger import Ledger
from trainfit.prediction.estimate import cost, estimate
from trainfit.prediction.machine import Machine, machine_of
from trainfit.prediction.predict import ledger_of, predict
from trainfit.prediction.time.calibrated import OwnCalibration
from trainfit.prediction.time.device_time import op_s
from trainfit.rl.estimate.estimate import estimate as loop_estimate
from trainfit.rl.estimate.estimate import ledger_of as loop_ledger
from trainfit.rl.estimate.names import UPDATE_PHASES, of_update_alone
from trainfit.rl.estimate.times import part_of, with_update
from trainfit.spec import micro_batches
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate, Interval
from trainfit.techniques import registry
from trainfit.virtual.cuda.op_kinds import COPY_DIRECTIONS


class Result(NamedTuple):
    """One recipe's estimate, or why it has none."""

    recipe: Recipe
    """With a budget for recomputation solved."""
    estimate: Estimate | None
    update_s: float = 0.0
    """Seconds of the optimizer's phase on the GPU, and of waiting for gradients that are reduced, or states
    that are copied, once a step, part of the step; 0 where a budget was solved."""
    refused: InputError | None = None
    is_complete: bool = True
    """False: the request's time was over. Not cached."""


class Request(NamedTuple):
    """A recipe to estimate; with ``recompute: {budget_gib: x}`` the budget is solved first."""

    recipe: Recipe
    exact: bool = True
    until_s: float = math.inf
    """Of ``time.monotonic()``: later no plan of recomputation is traced. Only in this process."""

    @property
    def key(self) -> tuple[str, bool]:
        """Equal for requests with equal results: most recipes are traced alike for both purposes."""
        recipe = self.recipe
        differs = recipe.batch.accumulate > 2 or any(
            one.trace_whole(recipe) for one in registry.applied(recipe)
        )
        return recipe.id, self.exact and differs and recipe.mesh.pipeline == 1

    @property
    def parts(self) -> "tuple[Request, ...]":
        """What is traced: itself; if exact, for more than three micro-batches, two and three of them."""
        batch, mesh = self.recipe.batch, self.recipe.mesh
        if not self.exact or self.recipe.plans_recompute or batch.accumulate <= 3 or mesh.pipeline > 1:
            return (self,)
        fewer = (batch.model_copy(update={"accumulate": count}) for count in (2, 3))
        return tuple(Request(self.recipe.model_copy(update={"batch": each})) for each in fewer)


def answer(request: Request, calibration: OwnCalibration | None = None, *, use_cache: bool = True) -> Result:
    """Return the result of one request, traced in this process; if exact, with all its micro-batches."""
    recipe = request.recipe
    try:
        machine = machine_of(recipe.hardware, calibration)
        if recipe.plans_recompute:
            from trainfit.planning.recompute.solver import OutOfTimeError, plan

            try:
                planned = plan(recipe, machine, until_s=request.until_s)
            except OutOfTimeError as error:
                return Result(recipe, None, refused=error, is_complete=False)
            return Result(planned.recipe, planned.estimate, is_complete=planned.is_complete)
        if recipe.mesh.pipeline > 1:
            found = predict(recipe, machine, use_cache=use_cache)
            return Result(recipe, found, found.time.optimizer_s if found.time else 0.0)
        if not request.exact:
            return _for_ranking(recipe, machine, use_cache)
        found, update_s, _ = _traced(recipe, machine, recipe.batch.accumulate, use_cache)
        return Result(recipe, found, update_s)
    except InputError as error:
        return Result(recipe, None, refused=error)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        problem = f"cannot be traced ({type(error).__name__}: {str(error)[:200]})"
        return Result(recipe, None, refused=InputError(problem, "please report it"))


def continued_result(recipe: Recipe, two: Result, three: Result) -> Result:
    """Return the exact result of more than three micro-batches, from those of two and of three."""
    for one in (two, three):
        if one.estimate is None:
            return Result(recipe, None, refused=one.refused)
    assert two.estimate is not None
    assert three.estimate is not None
    return Result(recipe, continued(recipe, two.estimate, three.estimate), two.update_s)


def continued(recipe: Recipe, two: Estimate, three: Estimate) -> Estimate:
    """Return the estimate of ``accumulate`` micro-batches from those of two and three: each adds the same.

    Memory is that of three: nothing more is kept from one micro-batch to the next.

    Raises:
        TypeError: a field of the estimate does not state how it follows (spec/micro_batches.py).
    """
    more = recipe.batch.accumulate - 3

    def on(before: float, after: float) -> float:
        return max(0.0, after + more * (after - before))

    def share(of_peak: float | None, before: float, after: float) -> float | None:
        return of_peak and of_peak * on(before, after) / after / slower

    step_s = on(two.step_s, three.step_s) if two.step_s and three.step_s else None
    slower = step_s / three.step_s if step_s and three.step_s else 1.0
    tokens_per_s = recipe.step_tokens / step_s if step_s else None
    loop, flops = three.loop, three.model_flops
    if loop is not None:
        loop = with_update(loop, slower, on(two.model_flops, flops) / flops)
    note = f"{recipe.batch.accumulate} micro-batches continued from two and three, each adding the same"
    return micro_batches.continued(
        two,
        three,
        on,
        recipe_id=recipe.id,
        tokens_per_s=tokens_per_s,
        mfu=share(three.mfu, two.model_flops, three.model_flops),
        hfu=share(three.hfu, two.hardware_flops, three.hardware_flops),
        cost=cost(recipe, three.cost and three.cost.price_per_gpu_hour, tokens_per_s),
        bounds={name: _scaled(one, slower) for name, one in three.bounds.items()},
        loop=loop,
        assumptions=(*three.assumptions, note),
    )


def _scaled(bound: Interval, factor: float) -> Interval:
    return bound.model_copy(update={"low": bound.low * factor, "high": bound.high * factor})


def _for_ranking(recipe: Recipe, machine: Machine, use_cache: bool) -> Result:
    accumulate = recipe.batch.accumulate
    found, update_s, added_s = _traced(recipe, machine, min(2, accumulate), use_cache, shorten=True)
    if accumulate > 2 and found.step_s:
        # The update, and what the host does once a step, is not done again for each micro-batch.
        step_s = machine.known.rates.host.step
        once_s = update_s + (min(step_s, found.time.host_s) if found.time else 0.0)
        # The first of the two adds to no gradients, every further one does.
        slower = 1 + max(0.0, found.step_s - once_s + added_s) / 2 / found.step_s
        found = continued(recipe, found, _of_three(found, slower))
    return Result(recipe, found.model_copy(update={"recipe_id": recipe.id}), update_s)


def _of_three(two: Estimate, slower: float) -> Estimate:
    """Return the estimate of three micro-batches, in a step that takes ``slower`` times that of two."""
    flops = {name: 1.5 * getattr(two, name) for name in ("model_flops", "hardware_flops")}
    return micro_batches.continued(
        two,
        two,
        lambda _, value: value * slower,
        recipe_id=two.recipe_id,
        tokens_per_s=two.tokens_per_s and two.tokens_per_s * 1.5 / slower,
        mfu=two.mfu and two.mfu * 1.5 / slower,
        hfu=two.hfu and two.hfu * 1.5 / slower,
        cost=two.cost,
        bounds={name: _scaled(one, slower) for name, one in two.bounds.items()},
        loop=two.loop and with_update(two.loop, slower, 1.5),
        assumptions=two.assumptions,
    ).model_copy(update=flops)


def _traced(
    recipe: Recipe, machine: Machine, accumulate: int, use_cache: bool, *, shorten: bool = False
) -> tuple[Estimate, float, float]:
    """Return an estimate, the seconds of its update, and those by which the last backward is longer."""
    batch = recipe.batch.model_copy(update={"accumulate": accumulate})
    traced = recipe.model_copy(update={"batch": batch})
    if of_update_alone(traced) is None:
        ledger = loop_ledger(traced, machine.row, use_cache=use_cache, shorten=shorten)
        found, ledger = loop_estimate(traced, machine, ledger), part_of(ledger, UPDATE_PHASES)
    else:
        ledger = ledger_of(traced, machine, use_cache=use_cache, shorten=shorten)
        found = estimate(traced, machine, ledger)
    is_continued = recipe.batch.accumulate > 2
    waits_once = _reduces_once(recipe) or (is_continued and _copies_once(recipe))
    waits_s = found.time.communication_s if found.time and waits_once else 0.0
    # Where gradients are reduced once, the last backward also does what belongs to that.
    added_s = 0.0 if _reduces_once(recipe) else _added_s(ledger, machine)
    return found, _update_s(ledger, machine, with_copies=not is_continued) + waits_s, added_s


def _reduces_once(recipe: Recipe) -> bool:
    """Return whether all communication is that of gradients, or updated weights, once a step."""
    mesh = recipe.mesh
    others = (mesh.tensor, mesh.context, mesh.pipeline)
    return mesh.data_ranks > 1 == max(others) and not mesh.syncs_each_batch and not recipe.offload.activations


def _copies_once(recipe: Recipe) -> bool:
    """Return whether all copies are those of the optimizer's state in the update, once a step."""
    offload = recipe.offload
    return offload.optimizer and not (recipe.optimizer.in_backward or offload.weights or offload.activations)


def _update_s(ledger: Ledger, machine: Machine, *, with_copies: bool) -> float:
    """Return the GPU's seconds of the update.

    Args:
        with_copies: count copies of offloaded state as if nothing ran beside them. A larger micro-batch then
            seems to cost little, so that plans also try offloaded state whose copies a backward hides.
    """
    if machine.gpu.memory_bytes_per_s is None:
        return 0.0
    updates = (
        op
        for op in ledger.steady_ops
        if ledger.segments[op.segment].phase == "optimizer"
        and (with_copies or op.name not in COPY_DIRECTIONS)
    )
    return sum(ledger.times(op) * op_s(op, machine) for op in updates)


def _added_s(ledger: Ledger, machine: Machine) -> float:
    """Return the GPU's seconds by which a step's last backward exceeds its first: it adds gradients."""
    if machine.gpu.memory_bytes_per_s is None:
        return 0.0
    backwards = dict[int, float]()
    for op in ledger.steady_ops:
        if ledger.segments[op.segment].phase == "backward":
            backwards[op.segment] = backwards.get(op.segment, 0.0) + ledger.times(op) * op_s(op, machine)
    return max(0.0, backwards[max(backwards)] - backwards[min(backwards)]) if len(backwards) > 1 else 0.0
