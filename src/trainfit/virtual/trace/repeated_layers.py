"""Find repeated layers (equal classes, shapes and plain attributes), and trim them to three groups."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from torch import nn

from trainfit.virtual.trace.scope import LayerGroups

MAX_PERIOD = 8
MAX_LEAD = 4
POSITION_NAMES = frozenset(
    {"layer_idx", "layer_id", "layer_index", "idx", "layer_number", "_is_hf_initialized"}
)
"""Attributes that number a layer, or say that it is initialised, and have no other effect."""
BLOCK_CONFIG = "trainfit_block_config"
"""Attribute of a layer, set by a technique: the layer's own configuration, such as its recomputation."""


def trim_layers(
    lists: Iterable[tuple[str, nn.ModuleList]],
    *,
    first_differs: bool = False,
    least_period: int = 1,
    multiple: int = 1,
    margin: tuple[int, int] = (0, 0),
) -> tuple[list[LayerGroups], tuple[int, ...], list[nn.Module]]:
    """Remove repeated layers from the model's list of layers; a model with several lists stays whole.

    Args:
        first_differs: the first layer works differently, because of the module before it.
        least_period: minimum layers of a group, for layers that affect others than their neighbours.
        multiple: a group has a multiple of so many layers, which take turns in as many buffers.
        margin: groups to keep before the first and after the last one, which differ in compiled code.
    Returns:
        The groups of each run of equal layers (none: nothing was removed), how many groups each middle one
        stands for, and the removed layers.
    """
    found = list(lists)
    if len(found) != 1:
        return [], (), []
    name, layers = found[0]
    signatures: list[Any] = [signature(layer) for layer in layers]
    if first_differs:
        signatures[0] = ("first", signatures[0])
    plan = find_period(signatures, least_period, multiple)
    if plan is None:
        if any(margin):
            return [], (), []
        return _shorten_runs(name, layers, signatures, least_period, multiple)
    lead, period = plan
    head = lead + period * (1 + margin[0])
    tail = period * (1 + margin[1]) + (len(layers) - lead) % period
    num_groups = (len(layers) - head - tail) // period
    if num_groups < 2:
        return [], (), []
    keep_from = len(layers) - tail
    removed = list(layers)[head + period : keep_from]
    kept = [*list(layers)[: head + period], *list(layers)[keep_from:]]
    _replace(layers, kept)
    return [LayerGroups(name, head, period, period)], (num_groups,), removed


def why_whole(lists: Iterable[tuple[str, nn.ModuleList]], least_period: int = 1, multiple: int = 1) -> str:
    """Return why ``trim_layers`` removes no layer of these lists."""
    found = list(lists)
    if len(found) != 1:
        names = ", ".join(name for name, _ in found)
        return f"{len(found)} lists of layers: {names}" if found else "no list of repeated layers"
    name, layers = found[0]
    signatures = [signature(layer) for layer in layers]
    pairs = enumerate(pairwise(signatures))
    unlike = next((number for number, (one, next_one) in pairs if one != next_one), None)
    if unlike is None or find_period(signatures, least_period, multiple) is not None:
        return f"{name} has {len(layers)} layers, too few to leave any out"
    where = _difference(signatures[unlike], signatures[unlike + 1])
    pair = f"{unlike} and {unlike + 1} differ in {where}"
    of = "" if multiple == 1 else f"a multiple of {multiple}, "
    return f"{name} repeats in no pattern of {of}up to {MAX_PERIOD} layers: {pair}"


def _difference(first: tuple[Any, ...], second: tuple[Any, ...]) -> str:
    """Name the first module in which two layers' signatures differ, and the difference."""
    for (path, kind, settings, tensors), (other_path, other_kind, others, other_tensors) in zip(
        first, second, strict=False
    ):
        if (path, kind) != (other_path, other_kind):
            return f"{path or 'their class'} ({kind.__name__}, {other_path} {other_kind.__name__})"
        ours, theirs = (*settings, *tensors), (*others, *other_tensors)
        changed = [*(one for one in ours if one not in theirs), *(one for one in theirs if one not in ours)]
        if changed:
            return f"{path}.{changed[0][0]}".strip(".")
    return "the number of their modules"


def _shorten_runs(
    name: str, layers: nn.ModuleList, signatures: list[Any], least_period: int, multiple: int
) -> tuple[list[LayerGroups], tuple[int, ...], list[nn.Module]]:
    """Trim each run of equal groups of layers, if the layers differ in BLOCK_CONFIG alone."""
    if len({signature(layer, block_config=False) for layer in layers}) != 1:
        return [], (), []  # The model may use its layers' indices, which trimming changes.
    groups: list[LayerGroups] = []
    repeats: list[int] = []
    kept: list[nn.Module] = []
    removed: list[nn.Module] = []
    start = 0
    while start < len(layers):
        period, length = _run_at(signatures, start, least_period, multiple)
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


def _run_at(signatures: list[Any], start: int, least_period: int, multiple: int) -> tuple[int, int]:
    """Return (period, number of layers) of the run from ``start`` on that removes most layers."""
    best, most = (1, 1), 0
    for period in periods(least_period, multiple):
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


def periods(least: int, multiple: int) -> range:
    """Return the numbers of layers that a group may have."""
    return range(-(-least // multiple) * multiple, MAX_PERIOD + 1, multiple)


def find_period(signatures: list[Any], least: int = 1, multiple: int = 1) -> tuple[int, int] | None:
    """Return (different leading layers, period) with the fewest layers to trace; None: nothing to remove."""
    best: tuple[int, int, int] | None = None
    for lead in range(min(MAX_LEAD, len(signatures)) + 1):
        for period in periods(least, multiple):
            num_kept = lead + 3 * period + (len(signatures) - lead) % period
            if num_kept >= len(signatures) or (best is not None and num_kept >= best[0]):
                continue
            if all(signatures[i] == signatures[i - period] for i in range(lead + period, len(signatures))):
                best = (num_kept, lead, period)
    return None if best is None else best[1:]


def signature(layer: nn.Module, *, block_config: bool = True) -> tuple[Any, ...]:
    """Return a value that is equal for layers of equal cost, with or without regard to BLOCK_CONFIG."""
    ignored = POSITION_NAMES if block_config else POSITION_NAMES | {BLOCK_CONFIG}
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
