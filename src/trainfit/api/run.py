"""Time, GPU-hours and dollars of a run, from the time of its step."""

from typing import Any

from trainfit.spec.errors import InputError
from trainfit.spec.result import Estimate, Run
from trainfit.spec.units import is_usual, read_count, read_seconds, read_share


def run_usage(
    tokens: float, step_tokens: int, step_s: float, num_gpus: int, price: float | None
) -> dict[str, Any]:
    """Return time, GPU-hours and, where a price is known, dollars of a run over ``tokens`` tokens."""
    run_s = tokens / step_tokens * step_s
    hours = num_gpus * run_s / 3600
    found = {"tokens": tokens, "step_tokens": step_tokens, "run_s": run_s, "gpu_hours": hours}
    return found if price is None else found | money(hours, price)


def run_of(estimate: Estimate, tokens: float) -> Run | None:
    """Return the run of an estimate's steps over ``tokens`` tokens; None: its speed is not known."""
    if not estimate.step_s or not estimate.tokens_per_s:
        return None
    step_tokens = round(estimate.tokens_per_s * estimate.step_s)
    price = estimate.cost and estimate.cost.price_per_gpu_hour
    found = run_usage(tokens, step_tokens, estimate.step_s, estimate.num_gpus, price)
    bounds = estimate.bounds.get("step_s")
    if bounds is not None:
        num_steps = tokens / step_tokens
        scaled = {"low": bounds.low * num_steps, "high": bounds.high * num_steps}
        found["bounds"] = bounds.model_copy(update=scaled)
    return Run(**found)


def money(hours: float, price: float) -> dict[str, Any]:
    return {"gpu_hours": hours, "price_per_gpu_hour": price, "dollars": hours * price}


def step_of_run(gpu_hours: float, tokens: float, step_tokens: int, num_gpus: int) -> float:
    """Return the seconds of a step of ``step_tokens`` in a run that took so many GPU-hours."""
    return gpu_hours * 3600 / num_gpus * step_tokens / tokens


def count_of(tokens: float | str, field: str = "tokens") -> float:
    """Return a count above 0, given as a number or as text such as ``100B``."""
    return _above_0(tokens, read_count, field)


def share_of(share: float | str, field: str = "mfu") -> float:
    """Return a share above 0, given as a number or as text such as ``40%``."""
    return _above_0(share, read_share, field)


def seconds_of(seconds: float | str, field: str = "step_s") -> float:
    """Return a duration above 0 in seconds, given as a number or as text such as ``448ms``."""
    return _above_0(seconds, read_seconds, field)


def _above_0(given: float | str, read: Any, field: str) -> float:
    try:
        value = read(given) if isinstance(given, str) else given
    except ValueError as error:
        raise InputError(str(error), "correct it", field=field, value=given) from None
    if not value > 0 or not is_usual(value):
        raise InputError(
            "must be above 0 and finite, and not beyond any real run", "correct it", field=field, value=given
        )
    return value
