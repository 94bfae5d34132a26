"""TensorBoard: scalars in ``tensorboard/`` of the run's folder."""

from pathlib import Path
from typing import Any

from trainfit.train.observer import EvalMetrics, RunStart, StepMetrics, TrainSummary

SCALARS = {
    "train/loss": "loss",
    "train/learning_rate": "learning_rate",
    "train/gradient_norm": "gradient_norm",
    "speed/step_s": "step_s",
    "speed/tokens_per_s": "tokens_per_s",
    "speed/mfu": "mfu",
    "speed/hfu": "hfu",
    "device/peak_memory_bytes": "peak_memory_bytes",
    "device/busy": "busy",
}
"""Tag of each field of StepMetrics."""


class TensorBoard:
    """Writes event files; a resumed run hides the events of the steps that it takes again."""

    def __init__(self) -> None:
        self._writer: Any = None

    def on_start(self, run: RunStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = run.first_step + 1 if run.first_step else None
        self._writer = SummaryWriter(str(Path(run.out) / "tensorboard"), purge_step=purge)

    def on_step(self, metrics: StepMetrics) -> None:
        for tag, field in SCALARS.items():
            value = getattr(metrics, field)
            if value is not None:
                self._writer.add_scalar(tag, value, metrics.step)

    def on_eval(self, metrics: EvalMetrics) -> None:
        self._writer.add_scalar("eval/loss", metrics.loss, metrics.step)
        self._writer.add_scalar("eval/perplexity", metrics.perplexity, metrics.step)

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._writer.flush()

    def on_end(self, summary: TrainSummary) -> None:
        """The scalars of the steps say it all."""

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
