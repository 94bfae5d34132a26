"""The ranks of a training run: their exchanges on the host, and their common end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from trainfit.parallel.processes import local_device, process_group
from trainfit.spec.errors import EXIT_BAD_INPUT, EXIT_IO, EXIT_STOPPED, InputError
from trainfit.spec.files import storage_failure
from trainfit.spec.recipe import Recipe
from trainfit.spec.stop import Stopped, StopSignal
from trainfit.training.ranks.launch import end_with_launcher, is_launched
from trainfit.training.ranks.watch import LINGER_S, Watch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
HOST_TIMEOUT = timedelta(days=7)
"""Timeout of exchanges on the host, long because ranks wait while rank 0 prepares data; watch.py ends hung
runs."""


class Ranks:
    """The processes that train one run; one process has no mesh and exchanges nothing."""

    def __init__(self, mesh: DeviceMesh | None, device: torch.device):
        self.mesh, self.device = mesh, device
        self.rank = 0 if mesh is None else dist.get_rank()
        self.world_size = 1 if mesh is None else dist.get_world_size()
        self.group: Any = None  # A gloo group, whose collectives need no device
        if mesh is not None:
            self.group = dist.new_group(backend="gloo", timeout=HOST_TIMEOUT)
        self.watch: Watch | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process writes logs and prints."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.mesh is not None

    def enter(self, step: int, phase: str) -> None:
        """Note for the watch that this rank begins a phase of a step (from 1)."""
        if self.watch is not None:
            self.watch.enter(step, phase)

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks. Waits for all, on the host."""
        if self.mesh is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, self.group)
        return values

    def on_first(self, action: Callable[[], T]) -> T:
        """Run ``action`` on rank 0 while the others wait on the host, and return its result everywhere.

        Raises:
            SystemExit: on the others, if the action failed; rank 0 raises the action's exception.
        """
        if self.mesh is None:
            return action()
        answer: list[Any] = [None, None]
        try:
            if self.is_first:
                answer = [action(), None]
        except BaseException as error:
            answer = [None, exit_code(error)]
            raise
        finally:
            dist.broadcast_object_list(answer, 0, self.group)
        if answer[1] is not None:
            raise SystemExit(answer[1])
        return answer[0]

    def check_all(self, error: OSError | None) -> None:
        """Raise the first rank's OSError on every rank, if any rank has one."""
        plain = None if error is None else (error.errno, error.strerror, error.filename)
        first = next(filter(None, self.gather(plain)), None)
        if first is not None:
            raise error if error is not None else OSError(*first)

    def numbers(self, *values: float) -> list[tuple[float, ...]]:
        """Return every rank's numbers, as ``gather`` does, at the cost of one small collective."""
        if self.mesh is None:
            return [values]
        own = torch.tensor(values, dtype=torch.float64)
        every = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(every, own, self.group)
        return [tuple(row.tolist()) for row in every]


class AgreedStop:
    """A stop signal on which every rank acts after the same step, with the attributes of a StopSignal."""

    def __init__(self, own: StopSignal):
        self._own = own
        self.name: str | None = None
        self.raises = False

    @property
    def received(self) -> str | None:
        """The signal that this rank received."""
        return self._own.name

    @property
    def number(self) -> int:
        """This rank's signal; 0: none."""
        return 0 if self.received is None else signal.Signals[self.received].value

    def agree(self, numbers: list[float]) -> None:
        """Adopt the signal that any rank received."""
        highest = int(max(numbers))
        self.name = self.name or (signal.Signals(highest).name if highest else None)


@contextmanager
def joined(
    recipe: Recipe, device_type: str, hang_timeout_s: float, how_to_resume: Callable[[], str]
) -> Iterator[Ranks]:
    """Yield the ranks that train ``recipe``: this process alone, or those that torchrun started.

    If one fails, all end with its exit code, and it alone reports why.

    Raises:
        SystemExit: another rank failed before.
    """
    if recipe.hardware.count == 1:
        yield Ranks(None, torch.device(device_type))
        return
    end_with_launcher()
    device = local_device(device_type)
    with process_group(recipe.mesh, device) as mesh:
        ranks = Ranks(mesh, device)
        if is_launched():
            ranks.watch = Watch(ranks.rank, ranks.world_size, hang_timeout_s, how_to_resume)
            ranks.watch.publish()
        ranks.gather(None)
        if ranks.watch is not None:
            ranks.watch.start()
        try:
            yield ranks
            if ranks.watch is not None:
                ranks.watch.finish()
            ranks.gather(None)
            if ranks.watch is not None:
                ranks.watch.leave()
        except BaseException as error:
            _fail(ranks, error)
            raise


def exit_code(error: BaseException) -> int:
    """Return the exit code of the command that an exception ends."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, (Stopped, KeyboardInterrupt)):
        return EXIT_STOPPED
    if isinstance(error, InputError):
        return EXIT_BAD_INPUT
    return 70 if storage_failure(error) is None else EXIT_IO


def _fail(ranks: Ranks, error: BaseException) -> None:
    """Publish the failure; raise SystemExit if another rank failed first."""
    if ranks.watch is None or isinstance(error, SystemExit):
        return
    if isinstance(error, RuntimeError):
        # A collective fails when its peer has died: the watch finds out, and ends this process.
        time.sleep(LINGER_S)
    code = exit_code(error)
    if not ranks.watch.fail(code, str(error)):
        raise SystemExit(code) from error
