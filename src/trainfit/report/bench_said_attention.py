"""Sentences of the pages of ``attention`` and ``flash`` that come from their rows.

Enters: rows of one device. Leaves: sentences, none where the rows for it are missing.
"""

from collections.abc import Sequence

from trainfit.report.bench_rows import having, median_s, number, values
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.units import format_bytes, format_seconds

LONG = (8192, 16384, 32768, 65536, 131072)
NAMES = {"ours": "ours", "cudnn": "cuDNN", "flash": "PyTorch's flash"}
BODIES = {"eager": "written out", "compiled": "compiled", "ours": "ours"}
WORDS = {"forward": "a forward", "both": "forward and backward"}
UNWAITED = "forward, not synchronised"


def of_flash(rows: Sequence[BenchRow]) -> list[str]:
    """Rates of forward and backward together, 16 heads in bf16, at the long lengths; how often ours are the fastest."""
    told: list[str] = []
    both = having(rows, {"dtype": "bf16", "heads": 16, "pass": "both"})
    for head in sorted(values(both, "head"), key=float):
        cells = [cell for seq in LONG if (cell := _rates(having(both, {"head": head, "seq": seq}), seq))]
        if cells:
            told.append(f"Head size {head}, forward and backward, TFLOP/s: {'; '.join(cells)}.")
    fastest: dict[str, list[str]] = {}
    for head in sorted(values(both, "head"), key=float):
        for seq in sorted(values(both, "seq"), key=float):
            times = _times(having(both, {"head": head, "seq": seq}))
            if "ours" in times and len(times) > 1:
                fastest.setdefault(min(times, key=lambda name: times[name]), []).append(
                    f"{seq:,} tokens of head {head}"
                )
    shapes = sum(map(len, fastest.values()))
    if shapes:
        others = "; ".join(
            f"{NAMES.get(name, name)} at {', '.join(at)}" for name, at in fastest.items() if name != "ours"
        )
        told.append(
            f"Of {shapes} shapes ours is the fastest at {len(fastest.get('ours', []))}{f', {others}' if others else ''}."
        )
    return told + _one_head(rows)


def _one_head(rows: Sequence[BenchRow]) -> list[str]:
    """One head beside PyTorch's own choice, at the longest length that both have."""
    told: list[str] = []
    both = having(rows, {"heads": 1, "pass": "both"})
    for dtype in values(both, "dtype"):
        for head in sorted(values(both, "head"), key=float):
            mine = having(both, {"dtype": dtype, "head": head})
            for seq in sorted(values(mine, "seq"), key=float, reverse=True):
                times = _times(having(mine, {"seq": seq}))
                if {"ours", "pytorch"} <= set(times):
                    told.append(
                        f"One head of {head} in {dtype}, {seq:,} tokens, forward and backward: ours {format_seconds(times['ours'])}, "
                        f"PyTorch's choice {format_seconds(times['pytorch'])}."
                    )
                    break
    return told


def _rates(rows: Sequence[BenchRow], seq: int) -> str:
    rates = {row.point["body"]: number(row, "tflops_per_s") for row in rows if row.status == "done"}
    known = [f"{name} {rates[body]:.0f}" for body, name in NAMES.items() if rates.get(body)]
    return f"{', '.join(known)} at {seq:,}" if len(known) > 1 and rates.get("ours") else ""


def _times(rows: Sequence[BenchRow]) -> dict[str, float]:
    return {
        str(row.point["body"]): row.times.median
        for row in rows
        if row.times is not None and row.status == "done"
    }


def of_attention(rows: Sequence[BenchRow]) -> list[str]:
    """Times at the longest length that all bodies have, memory before backward, and where memory runs out; rates with a mask."""
    kernels = [row for row in rows if "mask" in row.point]
    rows = _of_one_head(rows)
    told = [
        line for dtype in values(rows, "dtype") for line in (_both(rows, dtype), _memory(rows, dtype)) if line
    ]
    ended = {
        (row.point["dtype"], row.point["body"]): row.point["seq"]
        for row in reversed(rows)
        if row.status == "out-of-memory"
    }
    if ended:
        where = [
            f"{BODIES.get(str(body), body)} in {dtype} at {seq:,} tokens"
            for (dtype, body), seq in sorted(ended.items())
        ]
        told.append(f"Memory runs out: {', '.join(where)}.")
    return told + _masked(kernels)


def _of_one_head(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Those that the course's table has; the others have a mask, or say that they have none."""
    return [row for row in rows if "mask" not in row.point]


def _masked(rows: Sequence[BenchRow]) -> list[str]:
    """Rates with an additive mask, at the longest length of each head size, by each kernel."""
    told: list[str] = []
    both = having(rows, {"mask": "additive", "pass": "both"})
    for dtype in values(both, "dtype"):
        cells: list[str] = []
        mine = having(both, {"dtype": dtype})
        for head in sorted(values(mine, "head"), key=float):
            of_head = having(mine, {"head": head})
            seq = max(values(of_head, "seq"), key=float)
            rates = [
                f"{NAMES.get(str(row.point['body']), row.point['body'])} {rate:.0f}"
                for row in having(of_head, {"seq": seq})
                if (rate := number(row, "tflops_per_s"))
            ]
            cells += [f"{', '.join(rates)} with heads of {head} at {seq:,}"] if rates else []
        if cells:
            told.append(
                f"With an additive mask in {dtype}, forward and backward, TFLOP/s: {'; '.join(cells)}."
            )
    return told


def _both(rows: Sequence[BenchRow], dtype: Cell) -> str:
    mine = having(rows, {"dtype": dtype, "head": 64, "pass": "both"})
    for seq in sorted(values(mine, "seq"), key=float, reverse=True):
        times = [
            (name, median_s(mine, {"seq": seq, "body": body}, steady=True)) for body, name in BODIES.items()
        ]
        if all(seconds for _, seconds in times):
            cells = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in times if seconds)
            return f"{dtype}, {seq:,} tokens, head size 64, forward and backward: {cells}."
    return ""


def _memory(rows: Sequence[BenchRow], dtype: Cell) -> str:
    mine = having(rows, {"dtype": dtype, "head": 64, "pass": "forward"})
    told: list[str] = []
    for body in ("eager", "ours"):
        sizes = {
            row.point["seq"]: number(row, "before_backward_bytes") for row in having(mine, {"body": body})
        }
        known = sorted((seq, size) for seq, size in sizes.items() if size)
        if len(known) > 1:
            (short, least), (long, most) = known[0], known[-1]
            told.append(
                f"{BODIES[body]} from {format_bytes(least)} at {short:,} tokens to {format_bytes(most)} at {long:,}"
            )
    return f"Memory before backward in {dtype} grows: {', '.join(told)}." if told else ""


def of_waiting(rows: Sequence[BenchRow]) -> str:
    """The same forward by the host's clock without waiting, and by events."""
    told: list[str] = []
    for row in having(rows, {"pass": UNWAITED}):
        right = median_s(rows, dict(row.point) | {"pass": "forward"})
        if row.times is not None and right:
            wrong = row.times.median
            told.append(
                f"{BODIES.get(str(row.point['body']), row.point['body'])} {format_seconds(wrong)} instead of {format_seconds(right)} "
                f"({right / wrong:.0f} times as long)"
            )
    if not told:
        return ""
    at = having(rows, {"pass": UNWAITED})[0].point
    return f"{at['seq']:,} tokens of head size {at['head']} in {at['dtype']}, without waiting: {', '.join(told)}."


def of_asking(rows: Sequence[BenchRow], which: str = "forward") -> str:
    """The device's time of ``which`` at the shortest length beside the host's to ask for it."""
    known = [
        row
        for row in having(_of_one_head(rows), {"pass": which, "head": 64})
        if row.times is not None and number(row, "host_s")
    ]
    if not known:
        return ""
    short = min(int(row.point["seq"]) for row in known)
    told = [
        f"{BODIES.get(str(row.point['body']), row.point['body'])} in {row.point['dtype']} {format_seconds(row.times.median)} on the device, "
        f"{format_seconds(number(row, 'host_s') or 0.0)} to ask"
        for row in having(known, {"seq": short})
        if row.times is not None
    ]
    return f"{WORDS[which]} of {short:,} tokens, head size 64: {'; '.join(told)}."


def of_asking_for_both(rows: Sequence[BenchRow]) -> str:
    """The same of forward and backward together."""
    return of_asking(rows, "both")
