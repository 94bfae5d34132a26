"""What a run tells while it goes, and who may listen. No torch here.

The loop knows no tracker: progress bar (progress.py), TensorBoard (board.py) and JSONL log (log.py) are observers.
"""

from pathlib import Path
from typing import Any, Literal, Protocol

from trainfit.spec.errors import EXIT_BAD_INPUT
from trainfit.spec.value import Bytes, Count, Flops, Seconds, Share, Value


class StepFlops(Value):
    """FLOPs of one optimizer step (from the Estimate) and the device's dense peak for the recipe's dtype, if known."""

    model_flops: Flops
    hardware_flops: Flops
    peak_flops_per_s: float | None = None


class RunStart(Value):
    """What is known before the first step."""

    out: str
    model: str
    device: str
    device_type: Literal["cpu", "cuda"]
    params: Count
    trainable_params: Count
    steps: Count
    """Of the whole run."""
    first_step: Count
    """Steps already done: 0, or the resumed checkpoint's."""
    tokens_per_step: Count
    train_tokens: Count
    eval_tokens: Count
    tokenizer_tokens: Count
    resumed_from: str | None = None
    notes: tuple[str, ...] = ()
    """What a person should know, such as versions that changed since the checkpoint."""


class StepMetrics(Value):
    """One optimizer step. ``step`` counts from 1, over the whole run."""

    step: Count
    loss: float
    """What training minimises, nats a token: with ``loss_terms`` not the cross-entropy alone."""
    learning_rate: float
    epoch: float
    """Passes over the training sequences so far."""
    step_s: Seconds
    tokens_per_s: float
    mfu: Share | None = None
    hfu: Share | None = None
    peak_memory_bytes: Bytes | None = None
    """Highest allocated bytes so far; on a CPU live tensor bytes of one step."""
    busy: Share | None = None
    """GPU utilisation as its driver tells it; on a CPU this process's time over that of all usable cores."""
    gradient_norm: float | None = None
    """Of all gradients together before clipping; None without clipping."""


class EvalMetrics(Value):
    """Evaluation after ``step`` steps."""

    step: Count
    loss: float
    """Mean next-token cross-entropy, nats a token, whatever training minimises."""
    perplexity: float
    sequences: Count
    eval_s: Seconds


class TrainSummary(Value):
    """What a run came to: the ``train`` field of a Record. Speeds and losses are of this process's steps."""

    status: Literal["done", "stopped", "diverged", "out-of-memory"]
    """stopped: by a signal, and resume goes on; diverged: loss or weights are not finite; see ``message``."""
    message: str = ""
    """Why it ended before its last step, and what to do."""
    steps: Count
    """Done in the whole run."""
    first_step: Count
    """Done before this process started."""
    final_loss: float | None
    """What training minimised at its last step: with ``loss_terms`` not the cross-entropy alone. So are ``losses``."""
    losses: tuple[float, ...]
    evaluations: tuple[EvalMetrics, ...]
    eval_perplexity: float | None
    """Of the last evaluation."""
    step_s: Seconds | None
    """Median, the first step left out when there are more."""
    tokens_per_s: float | None
    """From the median step."""
    mfu: Share | None
    hfu: Share | None
    peak_memory_bytes: Bytes | None
    peak_memory_is: Literal["cuda-allocated", "live-tensors"] | None
    wall_s: Seconds
    run: RunStart
    checkpoint: str | None
    """The newest one's folder."""

    @property
    def exit_code(self) -> int:
        """0 done; 75 stopped early, can be resumed (EX_TEMPFAIL in sysexits.h); 65 the recipe does not work here."""
        return {"done": 0, "stopped": 75}.get(self.status, EXIT_BAD_INPUT)

    def content(self) -> dict[str, Any]:
        """Plain data, as a Record holds it."""
        return self.model_dump(mode="json")


class Observer(Protocol):
    """Hears what happens. Errors it raises end the run, as a full disk should."""

    def on_start(self, run: RunStart) -> None: ...

    def on_step(self, metrics: StepMetrics) -> None: ...

    def on_eval(self, metrics: EvalMetrics) -> None: ...

    def on_checkpoint(self, step: int, path: Path) -> None: ...

    def on_end(self, summary: TrainSummary) -> None:
        """The run ended as ``summary`` says. Not called when an exception ended it."""

    def close(self) -> None:
        """The run is over, whichever way. Called once, last."""
