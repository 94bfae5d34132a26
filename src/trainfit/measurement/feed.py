"""Feed: micro-batches on the device, read by the recipe's loader; and the batches of measured steps."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from trainfit.measurement.machine import check_processes
from trainfit.spec.recipe import Loader, Recipe

if TYPE_CHECKING:
    import torch

    from trainfit.step import Batch, Step

END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


Source = Callable[[int], "dict[str, torch.Tensor]"]
"""Returns all sequences of a step (from 0), int64 [accumulate * micro, s], on the CPU.

``input_ids``; ``labels``, if they differ; ``position_ids``, if documents are kept apart; ``weight`` float64
[accumulate * micro], if the sequences' labels differ in number. It is pickled for the workers where processes
do not fork.
"""


def random_tokens(
    vocabulary: int, sequences: int, seq: int, seed: int, step: int, *, positions: bool = False
) -> dict[str, torch.Tensor]:
    """Return uniform token ids, equal for equal seed and step number on every machine.

    Args:
        positions: with position ids, of one document a sequence.
    """
    import torch

    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    found = {"input_ids": torch.randint(vocabulary, (sequences, seq), generator=generator)}
    return found | ({"position_ids": torch.arange(seq).repeat(sequences, 1)} if positions else {})


class Feed:
    """Iterator over the micro-batches of one step after another, on the device.

    Each micro-batch is a ``step.Batch``. Leaving its context ends the workers.
    """

    reads_ahead = True

    def __init__(self, recipe: Recipe, source: Source, device: torch.device, steps: range):
        """Start the workers, which read for the step numbers ``steps``."""
        import torch
        from torch.utils.data import DataLoader

        options = recipe.loader
        check_processes(options.workers, "loader.workers")
        self._micro, self._device = recipe.micro_sequences, device
        self._asked: Any = None  # Marks before and after the loader's answer
        self._answered: Any = None
        self._pinned = options.pin_memory and device.type == "cuda"
        loader: Any = DataLoader(
            _Steps(source),  # pyright: ignore[reportArgumentType]
            sampler=steps,
            batch_size=None,
            num_workers=options.workers,
            prefetch_factor=options.prefetch if options.workers else None,
            pin_memory=self._pinned,
            worker_init_fn=_outlive_the_first_signal,
            generator=torch.Generator(),  # Not torch's default one, which dropout draws from.
        )
        # No signal may end a worker between its start and the installation of its handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
        try:
            self._sequences = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __iter__(self) -> Iterator[list[dict[str, torch.Tensor]]]:
        return self

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        """Return the next step's micro-batches."""
        batches: list[dict[str, torch.Tensor]] = []
        self._asked = self._answered = self._now()
        whole = next(self._sequences)
        self._answered = self._now()
        weight = whole.pop("weight", None)
        parts = {name: tensor.split(self._micro) for name, tensor in whole.items()}
        for number in range(len(parts["input_ids"])):
            batch = {
                name: part[number].to(self._device, non_blocking=self._pinned, copy=True)
                for name, part in parts.items()
            }
            batch.setdefault("labels", batch["input_ids"].clone())
            if weight is not None:
                batch["weight"] = weight.split(self._micro)[number].mean()
            batches.append(batch)
        return batches

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait_s(self) -> float:
        """Return the seconds that the device waited for the newest batches; call it once they are on it.

        On a GPU: from the end of the work issued before the loader was asked, to its answer; 0 where the
        loader was faster. A CPU waits as long as the host.
        """
        if self._device.type == "cuda":
            return self._asked.elapsed_time(self._answered) / 1e3
        return self._answered - self._asked

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers; those that do not end within torch's 5 s are killed."""
        workers = getattr(self._sequences, "_workers", ())
        if workers:
            self._sequences._shutdown_workers()
        for worker in workers:
            if worker.is_alive():
                worker.kill()
                worker.join()


@dataclass(frozen=True)
class _Steps:
    """Map-style dataset: item i holds the sequences of step i."""

    source: Source

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        return self.source(step)


@contextmanager
def measured_batches(step: Step, num_steps: int) -> Iterator[Callable[[], list[Batch]]]:
    """Yield a function that returns the micro-batches of each of at most ``num_steps`` steps.

    With the loader's defaults every step gets the same batches, so its time excludes loading; other loaders
    are compared with it. Otherwise random tokens pass through the recipe's loader.
    """
    from trainfit.step import vocabulary

    recipe = step.recipe
    if recipe.loader == Loader():
        batches = step.random_batches(recipe.seed)
        yield lambda: batches
        return
    sequences = recipe.micro_sequences * recipe.batch.accumulate
    apart = recipe.data.pack == "documents"
    arguments = vocabulary(step.model), sequences, recipe.batch.seq, recipe.seed
    source = partial(random_tokens, *arguments, positions=apart)
    with Feed(recipe, source, step.device, range(num_steps)) as feed:
        yield feed.__next__


def _outlive_the_first_signal(worker: int) -> None:
    """Ignore the first signal: the training process ends in order and may still need its workers' data."""

    def once(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)

    for number in END_SIGNALS:
        signal.signal(number, once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
