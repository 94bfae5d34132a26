"""Estimates of many micro-batches a step, continued from two and three: each further one adds the same."""

from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate

LINEAR = ("model_flops", "hardware_flops", "step_s")


def scaled(found: Estimate, factor: float) -> Estimate:
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


def continued(recipe: Recipe, two: Estimate, three: Estimate) -> Estimate:
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
