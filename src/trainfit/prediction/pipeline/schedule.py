"""Replay a pipeline's schedule in time: when each GPU computes, waits, and is done. No torch here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainfit.spec.pipeline import Action, order
from trainfit.spec.recipe import Parallel


@dataclass(frozen=True)
class Timeline:
    """Seconds of one step's forwards and backwards, by position in the pipeline."""

    end_s: tuple[float, ...]
    busy_s: tuple[float, ...]

    @property
    def total_s(self) -> float:
        return max(self.end_s)

    @property
    def bubble(self) -> float:
        """Share of all GPUs' time that they wait for each other."""
        total_s = len(self.busy_s) * self.total_s
        return 1 - sum(self.busy_s) / total_s if total_s else 0.0


def timeline(
    parallel: Parallel,
    num_micro_batches: int,
    seconds: Callable[[int, Action], tuple[float, float]],
    transfer_s: Callable[[int, int], float],
) -> Timeline:
    """Return when each GPU is done, all beginning at once.

    An action begins when the GPU's last one is done and what it needs has arrived; sending takes no GPU time.
    What a first forward gathers is gathered before its input is there, what a last backward reduces after its
    result is sent.

    Args:
        seconds: of an action, by the number of its stage in the model, and more seconds before a forward or
            after a backward.
        transfer_s: seconds from one position of the pipeline to another.
    """
    ranks, last = parallel.pipeline, parallel.pipeline * parallel.stages_per_rank - 1
    orders: Sequence[list[Action]] = [order(parallel, rank, num_micro_batches) for rank in range(ranks)]
    done: dict[tuple[bool, int, int], float] = {}
    position, now, busy = [0] * ranks, [0.0] * ranks, [0.0] * ranks

    def arrives(action: Action, stage: int) -> float | None:
        """Return when the action's input is there; None: not known yet."""
        before = stage - 1 if action.is_forward else stage + 1
        if not 0 <= before <= last:
            return 0.0
        sent = done.get((action.is_forward, before, action.micro_batch))
        return None if sent is None else sent + transfer_s(before % ranks, stage % ranks)

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(orders):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                stage = action.chunk * ranks + rank
                arrived = arrives(action, stage)
                if arrived is None:
                    break
                took, more = seconds(stage, action)
                before, after = (more, 0.0) if action.is_forward else (0.0, more)
                end = max(now[rank] + before, arrived) + took
                done[action.is_forward, stage, action.micro_batch] = end
                now[rank] = end + after
                busy[rank] += took + more
                position[rank] += 1
                moved = True
    assert all(at == len(actions) for at, actions in zip(position, orders, strict=True)), "deadlock"
    return Timeline(tuple(now), tuple(busy))
