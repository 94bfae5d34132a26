"""The loader: how batches reach the device, by how many processes, how far ahead and from which memory.

``workers`` processes (torch's DataLoader) read ahead, ``prefetch`` steps each; 0 reads in the training process itself.
From pinned memory a copy to a GPU does not hold up the host; from pageable memory the host waits until the GPU has come
to it. Which sequences a step gets depends on the step's number alone, so they are the same with any number of workers
and after a resume.

On the device there is one step's data while the step runs: the next step's is copied when all of this step has been
issued, behind its last kernel. So the loader changes no byte of the peak, and ``predict`` knows none. ``measure``
computes on one batch that stays on the device, as long as the loader has its defaults; where it has not, it is fed
random tokens through the loader, as ``train`` is with text.

Helps where reading and cutting text takes the host longer than a step takes the GPU.

Costs no quality: the same sequences in the same order.

Refuses nothing.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Loader, Recipe
from trainfit.techniques.base import Data, Draw, Technique

if TYPE_CHECKING:
    import torch


END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def check(recipe: Recipe) -> None:
    """Only workers prepare anything ahead."""
    asked = recipe.loader
    if asked.workers == 0 and asked.prefetch != Loader().prefetch:
        raise InputError(
            "no worker is there to prepare batches ahead",
            "set loader.workers to 1 or more, or leave loader.prefetch out",
            field="loader.prefetch",
            value=asked.prefetch,
        )


class Source(Protocol):
    """Where sequences come from; it goes to the workers by pickle where processes do not fork."""

    def __call__(self, step: int) -> torch.Tensor:
        """All sequences of the step with this number (from 0), int64 [accumulate * micro, s], on the CPU."""
        ...


@dataclass(frozen=True)
class RandomTokens:
    """Uniform token ids, the same for a seed and a step's number on every machine."""

    vocabulary: int
    sequences: int
    seq: int
    seed: int

    def __call__(self, step: int) -> torch.Tensor:
        import torch

        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) % 2**63)
        return torch.randint(self.vocabulary, (self.sequences, self.seq), generator=generator)


class Feed:
    """The micro-batches of one step after another on the device, read as the recipe's loader says.

    An iterator of what a ``Step`` takes: for each micro-batch ``input_ids`` and ``labels``, int64 [b, s]. A context
    manager: at its end, whichever way it comes, the workers are gone.
    """

    def __init__(self, recipe: Recipe, source: Source, device: torch.device, steps: range):
        """``steps``: numbers of the steps to read for. The workers begin at once."""
        import torch
        from torch.utils.data import DataLoader

        asked = recipe.loader
        self._micro, self._device = recipe.batch.micro, device
        self._pinned = asked.pin_memory and device.type == "cuda"
        loader: Any = DataLoader(
            _Steps(source, steps),  # pyright: ignore[reportArgumentType]
            batch_size=None,
            num_workers=asked.workers,
            prefetch_factor=asked.prefetch if asked.workers else None,
            pin_memory=self._pinned,
            worker_init_fn=_outlive_the_first_signal,
            generator=torch.Generator(),  # Its own: torch's default one belongs to dropout.
        )
        # A worker must not be ended between its start and its own handlers of signals.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
        try:
            self._sequences = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __iter__(self) -> Iterator[list[dict[str, torch.Tensor]]]:
        return self

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        batches: list[dict[str, torch.Tensor]] = []
        for part in next(self._sequences).split(self._micro):
            ids_bs = part.to(self._device, non_blocking=self._pinned, copy=True)
            batches.append({"input_ids": ids_bs, "labels": ids_bs.clone()})
        return batches

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        """Workers that do not end within torch's patience (5 s) are killed."""
        workers = getattr(self._sequences, "_workers", ())  # Without workers there is nothing to end.
        if workers:
            self._sequences._shutdown_workers()
        for worker in workers:
            if worker.is_alive():
                worker.kill()
                worker.join()


@dataclass(frozen=True)
class _Steps:
    """What torch calls a map-style dataset: item i is step ``steps[i]``'s sequences."""

    source: Source
    steps: range

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.source(self.steps[index])


def _outlive_the_first_signal(worker: int) -> None:
    """A signal to the whole group asks the training process to end well; it may still need its workers' data."""

    def once(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)

    for number in END_SIGNALS:
        signal.signal(number, once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)


def _describe(recipe: Recipe) -> str:
    return f"{recipe.loader.workers} loader workers" if recipe.loader.workers else ""


def _draw(chance: random.Random, _: Data) -> Data:
    # (0, True) is the default.
    workers, pinned = chance.choice(((0, False), (1, True), (2, True), (2, False)))
    return {"loader": {"workers": workers, "pin_memory": pinned}}


TECHNIQUE = Technique(
    name="loader",
    order=220,
    title="Loader",
    fields=("loader",),
    turned_on_by="`loader.*`",
    use_when="the GPU waits for data",
    main_cost="host processes",
    check=check,
    when=lambda recipe: recipe.loader != Loader(),
    describe=_describe,
    examples=({"loader": {"workers": 2}},),
    draw=Draw(alone=_draw),
)
