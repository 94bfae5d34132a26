"""Find the layers that repeat, and keep only as many as tell the whole.

Enters: the ModuleLists of a built model. Leaves: the same lists, shortened in place, and how many groups the middle
one stands for. Layers are equal when their classes, parameter and buffer shapes and plain settings are.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from trainfit.virtual.trace.scope import LayerGroups

MAX_PERIOD = 8
MAX_LEAD = 4
POSITION_NAMES = frozenset({"layer_idx", "layer_id", "layer_index", "idx", "layer_number"})
"""Settings that number a layer and change nothing else."""
BLOCK_CONFIG = "trainfit_block_config"
"""Setting that a technique writes on a layer: what this one is to do, of several things that equal layers can."""


def trim_layers(
    lists: Iterable[tuple[str, nn.ModuleList]], *, first_differs: bool = False, least_period: int = 1
) -> tuple[list[LayerGroups], tuple[int, ...], list[nn.Module]]:
    """Cut the middle out of the one list of layers, where layers repeat.

    Args:
        first_differs: the first layer does something else than its equals, for what comes before it.
        least_period: layers of a group at least, where what one layer makes concerns others than its neighbours.
    Returns:
        groups, one entry a run of equal layers (empty: nothing was cut), for each how many groups its middle one
        stands for, and the layers cut out. A model with several lists of layers is left whole.
    """
    found = list(lists)
    if len(found) != 1:
        return [], (), []
    name, layers = found[0]
    signatures: list[Any] = [signature(layer) for layer in layers]
    if first_differs:
        signatures[0] = ("first", signatures[0])
    plan = find_period(signatures, least_period)
    if plan is None:
        return _shorten_runs(name, layers, signatures, least_period)
    lead, period = plan
    tail = period + (len(layers) - lead) % period
    num_groups = (len(layers) - lead - period - tail) // period
    keep_from = len(layers) - tail
    removed = list(layers)[lead + 2 * period : keep_from]
    kept = [*list(layers)[: lead + 2 * period], *list(layers)[keep_from:]]
    _replace(layers, kept)
    return [LayerGroups(name, lead + period, period, period)], (num_groups,), removed


def _shorten_runs(
    name: str, layers: nn.ModuleList, signatures: list[Any], least_period: int
) -> tuple[list[LayerGroups], tuple[int, ...], list[nn.Module]]:
    """Each run of equal groups of layers by itself, where the layers differ in what they were told (TOLD) alone."""
    if len({signature(layer, told=False) for layer in layers}) != 1:
        return [], (), []  # The model may ask for its layers by number, and cutting would change the numbers.
    groups: list[LayerGroups] = []
    repeats: list[int] = []
    kept: list[nn.Module] = []
    removed: list[nn.Module] = []
    start = 0
    while start < len(layers):
        period, length = _run_at(signatures, start, least_period)
        run = list(layers)[start : start + length]
        if length > 3 * period:
            groups.append(
                LayerGroups(name, period, period, period, len(groups), len(kept), len(kept) + 3 * period)
            )
            repeats.append(length // period - 2)
            removed += run[2 * period : -period]
            run = [*run[: 2 * period], *run[-period:]]
        kept += run
        start += length
    if removed:
        _replace(layers, kept)
    return groups, tuple(repeats), removed


def _run_at(signatures: list[Any], start: int, least_period: int) -> tuple[int, int]:
    """(period, number of layers, a multiple of it) of the run that begins here and leaves most layers untraced."""
    best, most = (1, 1), 0
    for period in range(least_period, MAX_PERIOD + 1):
        length = period
        while (
            start + length < len(signatures)
            and signatures[start + length] == signatures[start + length - period]
        ):
            length += 1
        length -= length % period
        if length - 3 * period > most:
            best, most = (period, length), length - 3 * period
    return best


def find_period(signatures: list[Any], least: int = 1) -> tuple[int, int] | None:
    """(leading layers that differ, period) with the fewest layers to trace; None if at least one group can't be saved."""
    best: tuple[int, int, int] | None = None
    for lead in range(min(MAX_LEAD, len(signatures)) + 1):
        for period in range(least, MAX_PERIOD + 1):
            num_kept = lead + 3 * period + (len(signatures) - lead) % period
            if num_kept >= len(signatures) or (best is not None and num_kept >= best[0]):
                continue
            if all(signatures[i] == signatures[i - period] for i in range(lead + period, len(signatures))):
                best = (num_kept, lead, period)
    return None if best is None else best[1:]


def signature(layer: nn.Module, *, told: bool = True) -> tuple[Any, ...]:
    """What two layers must share to cost the same; without ``told``, to be the same layer told to do something else."""
    ignored = POSITION_NAMES if told else POSITION_NAMES | {BLOCK_CONFIG}
    parts: list[Any] = []
    for name, module in layer.named_modules():
        settings = tuple(
            sorted(
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, bool | int | float | str) and key not in ignored
            )
        )
        tensors = tuple(
            (key, tuple(t.shape), t.dtype, t.requires_grad)
            for key, t in (*module._parameters.items(), *module._buffers.items())
            if t is not None
        )
        parts.append((name, type(module), settings, tensors))
    return tuple(parts)


def _replace(layers: nn.ModuleList, kept: list[nn.Module]) -> None:
    for index in reversed(range(len(layers))):
        del layers[index]
    layers.extend(kept)
