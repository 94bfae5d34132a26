"""A meter of Hugging Face's Trainer (and TRL's, which derive from it): ``add_to(trainer)``.

Its values are among those that the Trainer logs, and so reach TensorBoard, W&B, MLflow and the console.
"""

from typing import Any

from transformers.trainer import Trainer
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from trainfit.integrations.meter import Watch


class MeterCallback(TrainerCallback):
    """Measures the training and adds its values to each log.

    A Trainer calls its callbacks in the order in which they were added. ``add_to`` puts this one before the
    loggers. Given in ``callbacks=[...]`` it comes after TensorBoard's and W&B's, which then lack its values.

    Args:
        options: of ``trainfit.watch``.
    """

    def __init__(self, **options: Any):
        self._options = {"print_every_s": None, **options}
        self.watch: Watch | None = None
        """While a training runs, and after it: its ``summary`` and ``record``."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to measure."""
        self.watch = Watch(kwargs["model"], **self._options).__enter__()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Mark the end of an optimizer step."""
        if self.watch is not None:
            self.watch.step()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the values of the steps since the last log to a log of the training loss."""
        if self.watch is None or logs is None or "loss" not in logs or (reading := self.watch.take()) is None:
            return
        logs.update(reading.logs())
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(reading.logs())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Read the last steps; print the summary if ``print_every_s`` is given; append the record."""
        if self.watch is not None:
            self.watch.__exit__(None, None, None)


def add_to(trainer: Trainer, **options: Any) -> MeterCallback:
    """Add a meter to a Trainer, before its loggers, and return it.

    Args:
        options: of ``trainfit.watch``, such as ``gpu``, ``prediction`` and ``record``.
    """
    meter = MeterCallback(**options)
    trainer.callback_handler.callbacks.insert(0, meter)
    return meter
