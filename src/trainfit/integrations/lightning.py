"""A meter of Lightning's Trainer: ``Trainer(callbacks=[MeterCallback()])``; values reach its loggers."""

import importlib
from typing import Any

from trainfit.integrations.meter import Watch
from trainfit.spec.optional import is_installed

_lightning: Any = importlib.import_module(
    "lightning.pytorch" if is_installed("lightning") else "pytorch_lightning"
)


class MeterCallback(_lightning.Callback):
    """Measures each optimizer step and logs its values through the module's ``log_dict``.

    Args:
        module: name of the attribute of the LightningModule that is the network, whose forwards are counted;
            None: the LightningModule, or its one child that has the parameters.
        options: of ``trainfit.watch``.
    """

    def __init__(self, module: str | None = None, **options: Any):
        self._module, self._options = module, {"print_every_s": None, **options}
        self.watch: Watch | None = None
        """While a training runs, and after it: its ``summary`` and ``record``."""
        self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to measure."""
        self._steps = trainer.global_step
        self.watch = Watch(self._network(pl_module), **self._options).__enter__()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Mark the end of an optimizer step, and log its values; accumulated batches are one step."""
        if self.watch is None or trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        reading = self.watch.step()
        if reading is not None:
            pl_module.log_dict(reading.logs(), on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Read the last steps; print the summary if ``print_every_s`` is given; append the record."""
        if self.watch is not None:
            self.watch.__exit__(None, None, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the measurement with the error, such as a lack of memory."""
        if self.watch is not None and self.watch.summary is None:
            self.watch.__exit__(type(exception), exception, exception.__traceback__)

    def _network(self, pl_module: Any) -> Any:
        if self._module is not None:
            return getattr(pl_module, self._module)
        children = [child for child in pl_module.children() if any(True for _ in child.parameters())]
        own = any(True for _ in pl_module.parameters(recurse=False))
        return children[0] if len(children) == 1 and not own else pl_module
