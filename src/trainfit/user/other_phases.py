"""Segments of user code that are no part of a training step: evaluations, generations and checkpoints.

A forward begins a segment of its own, and so does code that switches gradients off or on; passes.py says
which forwards no backward needs. Code between two forwards of an evaluation belongs to it, and so does code
without gradients before and after one:

    optimizer.step()
    ema.update(model)              no gradients, and no forward after it: step
    for y in validation:
        y = y.cuda()               between two forwards of an evaluation: evaluation
        with torch.no_grad():
            loss = model(y)        evaluation
            total += loss          no gradients, after its forward: evaluation
    state = model.state_dict()     a full state dict of FSDP gathers parameters here: checkpoint
    torch.save(state, path)        checkpoint
    x = next(loader).cuda()        with gradients: step
    model(x).mean().backward()     step
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor, nn

from trainfit.user.passes import Passes

LOOSE = ("data", "forward")
"""Phases that may be part of another phase than the step; a backward and an update end both."""


class SegmentStart(NamedTuple):
    """Phase of a segment, and the updates and backward-to-forward turns before it."""

    phase: str
    num_updates: int
    num_turns: int
    has_grad: bool = True
    """Gradients were on when it began."""
    forward: int = -1
    """Number of the pass that began it."""
    is_saved: bool = False
    """It is part of writing a checkpoint."""
    saved_bytes: int = 0


class OtherPhase(NamedTuple):
    """One evaluation, generation or checkpoint."""

    kind: str
    segments: range
    step: int
    """Optimizer steps before it."""
    num_forwards: int
    saved_bytes: int


def kinds_of(
    starts: Sequence[SegmentStart], passes: Passes, is_over: Callable[[SegmentStart], bool]
) -> dict[int, str]:
    """Return the kinds of the segments that are no part of a step, by position.

    Args:
        is_over: returns whether a segment began after the last whole step; its backward may be missing.
    """
    passes.resolve()
    needed = {one.module for one in passes.all if one.kind == "step" and not one.has_grad}
    of_forward = dict[int, str]()
    for position, start in enumerate(starts):
        if start.forward < 0:
            continue
        one = passes.all[start.forward]
        is_cut = is_over(start) and (one.has_grad or one.module in needed)
        of_forward[position] = "step" if is_cut else one.kind
    found = {position: kind for position, kind in of_forward.items() if kind != "step"}
    for position, start in enumerate(starts):
        if start.is_saved:
            found[position] = "checkpoint"
        elif position and start.forward < 0 and start.phase in LOOSE:
            before, after = (_next(starts, of_forward, position, way, any_grad=True) for way in (-1, 1))
            same_region = None if start.has_grad else _next(starts, of_forward, position, 1, any_grad=False)
            kind = after if before == after else same_region
            if kind is not None and kind != "step":
                found[position] = kind
    return found


def _next(
    starts: Sequence[SegmentStart], of_forward: dict[int, str], position: int, way: int, *, any_grad: bool
) -> str | None:
    """Return the kind of the next forward, or the one before (``way`` -1), in the same stretch of code."""
    position += way
    while 0 < position < len(starts) and starts[position].phase in LOOSE and not starts[position].is_saved:
        if not any_grad and starts[position].has_grad:
            return None
        if position in of_forward:
            return of_forward[position]
        position += way
    return None


def other_phases(
    starts: Sequence[SegmentStart], kinds: dict[int, str], number_of: Callable[[SegmentStart], int]
) -> Iterator[OtherPhase]:
    """Yield the evaluations, generations and checkpoints in order."""
    for kind, run in groupby(range(len(starts)), key=lambda position: kinds.get(position)):
        if kind is None:
            continue
        positions = list(run)
        yield OtherPhase(
            kind,
            range(positions[0], positions[-1] + 1),
            number_of(starts[positions[0]]),
            sum(starts[position].forward >= 0 for position in positions),
            sum(starts[position].saved_bytes for position in positions),
        )


def scorings(
    starts: Sequence[SegmentStart], kinds: dict[int, str], number_of: Callable[[SegmentStart], int]
) -> Iterator[OtherPhase]:
    """Yield the parts of steps that run forwards without gradients: log-probabilities of a policy, a teacher.

    Their time and memory are the step's as well.
    """

    def scores(position: int) -> bool:
        start = starts[position]
        return position > 0 and start.phase in LOOSE and not start.has_grad and position not in kinds

    for is_scoring, run in groupby(range(len(starts)), key=scores):
        positions = list(run)
        num_forwards = sum(starts[position].forward >= 0 for position in positions)
        if is_scoring and num_forwards:
            step = number_of(starts[positions[0]])
            yield OtherPhase("scoring", range(positions[0], positions[-1] + 1), step, num_forwards, 0)


def bytes_of(obj: Any) -> int:
    """Return the bytes of the different storages in nested containers and modules."""
    storages = dict[int, int]()
    _find_storages(obj, storages)
    return sum(storages.values())


def _find_storages(obj: Any, storages: dict[int, int]) -> None:
    if isinstance(obj, Tensor):
        storage = getattr(obj, "_local_tensor", obj).untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    elif isinstance(obj, dict):
        for value in obj.values():
            _find_storages(value, storages)
    elif isinstance(obj, list | tuple | set):
        for value in obj:
            _find_storages(value, storages)
    elif isinstance(obj, nn.Module):
        for value in (*obj.parameters(), *obj.buffers()):
            _find_storages(value, storages)
