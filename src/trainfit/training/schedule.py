"""The learning rate of a step: a pure function of the step's number."""

import math

FLOOR = 0.1
"""The cosine ends at this share of the recipe's rate (Hoffmann et al., "Training Compute-Optimal Large Language
Models", 2022, appendix A: decay by 10x over the run's length)."""


def learning_rate(base: float, step: int, *, steps: int, warmup_steps: int, schedule: str) -> float:
    """The rate of step ``step`` (from 0) of ``steps``: linear warm-up, then constant or a cosine down to a tenth."""
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    if schedule == "constant":
        return base
    done = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    return base * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
