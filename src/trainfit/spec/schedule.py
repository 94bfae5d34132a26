"""Learning-rate schedules by the names of the Hugging Face Trainer's ``lr_scheduler_type``.

After the warm-up the rates equal those of ``transformers.get_scheduler``. The warm-up's first step already
has a rate above 0: rate (i + 1) / n in step i of n, where transformers has i / n.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

ScheduleName = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "polynomial",
    "inverse_sqrt", "warmup_stable_decay",
]  # fmt: skip
SYNONYMS = {
    "wsd": "warmup_stable_decay",
    "cosine_with_floor": "cosine_with_min_lr",
    "warmup-stable-decay": "warmup_stable_decay",
}
ScheduleField = Annotated[
    ScheduleName,
    BeforeValidator(lambda name: SYNONYMS.get(name, name) if isinstance(name, str) else name),
]
FLOORS: dict[str, float] = {"cosine_with_min_lr": 0.1}
"""Last share of the rate where none is given; of the others 0. A tenth: Hoffmann et al., 2022, appendix A."""
DECAYING = ("linear", "cosine", "cosine_with_min_lr", "polynomial", "warmup_stable_decay")
"""Schedules that depend on the number of steps."""
WITH_FLOOR = ("linear", "cosine", "cosine_with_min_lr", "polynomial", "warmup_stable_decay")
DECAY_SHARE = 0.1
"""Of ``warmup_stable_decay``: share of the steps in which the rate falls, where none is given."""
TIMESCALE = 10_000
"""Of ``inverse_sqrt`` without a warm-up, as in transformers."""


def rate_share(
    name: ScheduleName,
    step: int,
    *,
    steps: int,
    warmup: int = 0,
    floor: float | None = None,
    decay: int | None = None,
    power: float = 1.0,
) -> float:
    """Return the share of the recipe's rate in ``step``, which counts from 0.

    Args:
        steps: of the whole run.
        warmup: steps of linear warm-up.
        floor: share at the end of the decay; None: the schedule's own, of ``FLOORS`` or 0.
        decay: steps in which ``warmup_stable_decay`` falls; None: a tenth of the run.
        power: of ``polynomial``.
    """
    if step < warmup:
        return (step + 1) / warmup
    floor = FLOORS.get(name, 0.0) if floor is None else floor
    if name in ("constant", "constant_with_warmup"):
        return 1.0
    if name == "inverse_sqrt":
        timescale = warmup or TIMESCALE
        return 1.0 / math.sqrt((step + timescale - warmup) / timescale)
    if name == "warmup_stable_decay":
        decay = decay_steps(steps, decay)
        done = (step - (steps - decay)) / decay if step >= steps - decay else 0.0
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    if name == "linear":
        return floor + (1 - floor) * (1 - done)
    if name == "polynomial":
        return floor + (1 - floor) * (1 - done) ** power
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def decay_steps(steps: int, decay: int | None) -> int:
    """Return the steps in which ``warmup_stable_decay`` falls."""
    return decay or max(1, round(steps * DECAY_SHARE))


def warmup_of(steps: int, warmup_steps: int, warmup_ratio: float) -> int:
    """Return the steps of the warm-up; a ratio is rounded up, as the Trainer does."""
    return warmup_steps or math.ceil(steps * warmup_ratio)


def contradiction(options: Any, steps: int) -> tuple[str, str, str] | None:
    """Return field, problem and remedy where a schedule's options do not fit ``steps`` or each other."""
    warmup = warmup_of(steps, options.warmup_steps, options.warmup_ratio)
    name = options.schedule
    if options.warmup_steps and options.warmup_ratio:
        return "warmup_ratio", "warmup_steps and warmup_ratio both set the warm-up", "keep one of them"
    if options.min_lr_share is not None and name not in WITH_FLOOR:
        return "min_lr_share", f"{name} does not fall to a last rate", "leave it out, or use schedule: cosine"
    if options.decay_steps is not None and name != "warmup_stable_decay":
        problem = f"{name} has no stretch of decay of its own"
        return "decay_steps", problem, "leave it out, or use schedule: warmup_stable_decay"
    if options.lr_power != 1.0 and name != "polynomial":
        return "lr_power", f"{name} has no power", "leave it out, or use schedule: polynomial"
    if name not in DECAYING:
        return None
    if warmup >= steps:
        where = "warmup_steps" if options.warmup_steps else "warmup_ratio"
        problem = f"a warm-up of {warmup} steps leaves no step of {steps} to the {name} schedule"
        return where, problem, "shorten the warm-up, or train more steps"
    if name == "warmup_stable_decay" and warmup + decay_steps(steps, options.decay_steps) > steps:
        problem = f"a warm-up of {warmup} and a decay of {decay_steps(steps, options.decay_steps)} steps"
        return "decay_steps", f"{problem} are over the run's {steps}", "shorten one of them"
    return None
