"""A log of the Hugging Face Trainer, or its trainer_state.json: tokens a second, and MFU with a recipe.

The Trainer prints a dict a line, in recent versions with its numbers as text, and one at the end:

    {'loss': '2.31', 'grad_norm': '1.2', 'learning_rate': '5e-05', 'epoch': '0.1'}
    {'train_runtime': '61.9', 'train_samples_per_second': '129.1', 'train_steps_per_second': '8.07', ...}
"""

import ast
import json
import math
import re
from pathlib import Path
from typing import Any

from trainfit.spec.errors import InputError
from trainfit.spec.files import read_text
from trainfit.spec.profile import TrainerRun

LINE = re.compile(r"\{'[^{}\n]{1,4000}\}")
MOST_STATE_BYTES = 1 << 28
FINAL = ("train_runtime", "train_steps_per_second")
REMEDY = "give a Trainer's log, or the trainer_state.json of a checkpoint"
NAMES = {
    "runtime_s": "train_runtime", "steps_per_s": "train_steps_per_second",
    "samples_per_s": "train_samples_per_second", "tokens_per_s": "train_tokens_per_second",
    "total_flos": "total_flos",
}  # fmt: skip
"""Field -> the Trainer's name."""


def read_log(text: str, *, file: str = "") -> TrainerRun | None:
    """Return what a Trainer's lines in a text say; None: there are none."""
    rows = list(filter(None, map(_row, LINE.findall(text))))
    rows = [row for row in rows if "loss" in row or "train_loss" in row or any(one in row for one in FINAL)]
    return _run(rows, {}, file) if rows else None


def read_state(path: Path) -> TrainerRun:
    """Return what a trainer_state.json says.

    Raises:
        InputError: naming the file and what is wrong with it.
    """
    try:
        state = json.loads(read_text(path, MOST_STATE_BYTES))
        history = state["log_history"]
        rows = [_numbers(one) for one in history if isinstance(one, dict)]
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"no state of a Trainer ({type(error).__name__})"
        raise InputError(problem, REMEDY, file=str(path)) from None
    if not rows:
        raise InputError("nothing was logged", REMEDY, file=str(path))
    return _run(rows, _numbers(state), str(path))


def _row(text: str) -> dict[str, float]:
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    return _numbers(found) if isinstance(found, dict) else {}


def _numbers(row: dict[Any, Any]) -> dict[str, float]:
    """Return the entries that are finite numbers from 0 on, or text of one."""
    found: dict[str, float] = {}
    for key, value in row.items():
        if not isinstance(key, str) or not isinstance(value, int | float | str) or isinstance(value, bool):
            continue
        try:
            number = float(value)
        except (ValueError, OverflowError):
            continue
        if math.isfinite(number) and 0 <= number < 1e30:
            found[key] = number
    return found


def _run(rows: list[dict[str, float]], state: dict[str, float], file: str) -> TrainerRun:
    final = next((row for row in reversed(rows) if "train_runtime" in row), {})
    losses = [row["loss"] for row in rows if "loss" in row]
    found: dict[str, Any] = {field: final.get(name) for field, name in NAMES.items()}
    found["total_flos"] = found["total_flos"] or state.get("total_flos") or None
    tokens = final.get("num_input_tokens_seen") or state.get("num_input_tokens_seen")
    steps = state.get("global_step") or next((row["step"] for row in reversed(rows) if "step" in row), None)
    runtime, per_s = found["runtime_s"], found["steps_per_s"]
    if steps is None and runtime and per_s:
        steps = round(runtime * per_s)
    if steps and runtime:  # With more digits than the Trainer prints.
        per_s = found["steps_per_s"] = steps / runtime if state.get("global_step") else per_s
    if tokens and runtime and not found["tokens_per_s"]:
        found["tokens_per_s"] = tokens / runtime
    return TrainerRun(
        file=file,
        num_logs=len(rows),
        num_steps=None if steps is None else int(steps),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        tokens=None if not tokens else int(tokens),
        step_s=1 / per_s if per_s else None,
        **found,
    )


def with_recipe(
    run: TrainerRun, flops: float, step_tokens: int, peak_flops_per_s: float | None, num_gpus: int
) -> TrainerRun:
    """Return the run with tokens a second and MFU.

    Args:
        flops: model FLOPs of one optimizer step on one GPU.
        step_tokens: of all GPUs.
    """
    update: dict[str, Any] = {"peak_flops_per_s": peak_flops_per_s, "num_gpus": num_gpus}
    if run.step_s:
        update["tokens_per_s"] = run.tokens_per_s or step_tokens / run.step_s
        # The log's own tokens count where it has them: its batches may be of another size.
        share = update["tokens_per_s"] * run.step_s / step_tokens if run.tokens_per_s else 1.0
        if peak_flops_per_s:
            update["mfu"] = share * flops / run.step_s / peak_flops_per_s
    if run.total_flos and run.runtime_s and peak_flops_per_s:
        update["mfu_by_total_flos"] = run.total_flos / run.runtime_s / peak_flops_per_s / num_gpus
    return run.model_copy(update=update)
