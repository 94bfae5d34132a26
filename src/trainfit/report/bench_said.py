"""Sentences of a page that come from its rows: what a run says to a claim whose answer is a number."""

from collections.abc import Mapping, Sequence

from trainfit.spec.bench import BenchRow, Cell

UNDER = 0.1
"""The share that published claims stay below."""


def of_kernels(rows: Sequence[BenchRow]) -> str:
    """Softmax's share of a forward, the optimizer's of a whole step, and attention's products beside softmax; empty: no such row."""
    told = [
        _share(rows, "forward", "softmax_share", "Softmax takes", "of a forward's busy time"),
        _share(rows, "whole step", "optimizer_share", "The optimizer takes", "of a whole step's"),
    ]
    core = [row for row in rows if row.point.get("attention's core in") == "forward" and row.numbers]
    for mode in dict.fromkeys(row.point["precision"] for row in core):
        mine = [row for row in core if row.point["precision"] == mode]
        times, flops = ([float(row.numbers[f"{of}_ratio"]) for row in mine] for of in ("time", "flops"))
        told.append(
            f"In {mode} the two products of attention's core take {min(times):.2f} to {max(times):.2f} times as long as softmax in the "
            f"forward, with {min(flops):.0f} to {max(flops):.0f} times its FLOPs."
        )
    return " ".join(line for line in told if line)


def _share(rows: Sequence[BenchRow], of: str, name: str, begins: str, ends: str) -> str:
    """The least and the greatest of a share, with their points, and how many are below ``UNDER``."""
    found = [
        (float(row.numbers[name]), row.point)
        for row in rows
        if row.point.get("pass") == of and name in row.numbers
    ]
    if not found:
        return ""
    (least, at_least), (most, at_most) = (pick(found, key=lambda one: one[0]) for pick in (min, max))
    below = sum(share < UNDER for share, _ in found)
    return (
        f"{begins} {least:.1%} ({_point(at_least)}) to {most:.1%} ({_point(at_most)}) {ends}, less than {UNDER:.0%} in {below} of "
        f"{len(found)} cases."
    )


def _point(point: Mapping[str, Cell]) -> str:
    return f"{point['model']}, {point['precision']}, context {point['context']}"
