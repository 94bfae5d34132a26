"""Sentences of the pages of ``gpu``, ``fusion``, ``streams``, ``dataloader``, ``accumulation`` and ``autocast`` that come from their rows.

Enters: rows of one device. Leaves: sentences, none where the rows for it are missing.
"""

from collections.abc import Sequence

from trainfit.report.bench_rows import having, median_s, number, rate_text, values
from trainfit.report.bench_step_tables import verdict
from trainfit.spec.bench import BenchRow
from trainfit.spec.units import format_seconds

DEVICE_CLOCKS = ("the device's events", "the host's clock, synchronised")
"""Clocks that wait for the product, the better one first."""
HASTY = "the host's clock, not synchronised"


def of_gpu(rows: Sequence[BenchRow]) -> list[str]:
    """The best bandwidth of each level, and the best rate of each dtype beside the data sheet."""
    told: list[str] = []
    reads = [
        (
            level,
            max(
                rate
                for row in having(rows, {"level": level})
                if (rate := number(row, "gb_per_s")) is not None
            ),
        )
        for level in values([row for row in rows if number(row, "gb_per_s") is not None], "level")
    ]
    if reads:
        told.append(f"Reads, GB/s: {', '.join(f'{level} {rate_text(rate)}' for level, rate in reads)}.")
    products: list[str] = []
    for dtype in values(
        [row for row in rows if "size" in row.point and number(row, "tflops_per_s")], "dtype"
    ):
        best = max(having(rows, {"dtype": dtype}), key=lambda row: number(row, "tflops_per_s") or 0.0)
        share = number(best, "of_data_sheet")
        of_sheet = "" if share is None else f" ({share:.0%} of the data sheet)"
        products.append(f"{dtype} {rate_text(number(best, 'tflops_per_s') or 0.0)}{of_sheet}")
    if products:
        told.append(f"Matrix products of random data, TFLOP/s: {', '.join(products)}.")
    return told + _sustained(rows)


def _sustained(rows: Sequence[BenchRow]) -> list[str]:
    """What layers without a pause reached: the least and the most of the shapes, and clocks and power where they are known."""
    told: list[str] = []
    for kind in values(rows, "sustained"):
        mine = having(rows, {"sustained": kind, "product": "all"})
        rates, shares, clocks, watts = (
            [known for row in mine if (known := number(row, name)) is not None]
            for name in ("tflops_per_s", "of_data_sheet", "sm_mhz", "watts")
        )
        if not rates:
            continue
        share = f" ({min(shares):.0%} to {max(shares):.0%} of the data sheet)" if shares else ""
        at = f" at {min(clocks):.0f} to {max(clocks):.0f} MHz" if clocks else ""
        at += f" and {max(watts):.0f} W" if watts else ""
        told.append(f"{kind} {rate_text(min(rates))} to {rate_text(max(rates))}{share}{at}")
    return [f"Layers of 8B without a pause, TFLOP/s: {'; '.join(told)}."] if told else []


def of_fusion(rows: Sequence[BenchRow]) -> list[str]:
    """Each way's share of a copy's bandwidth and its launches; the fastest against eager."""
    told: list[str] = []
    for count in values(rows, "rows"):
        mine = [row for row in having(rows, {"rows": count}) if number(row, "of_a_copy") is not None]
        if not mine:
            continue
        ways = ", ".join(
            f"{row.point['body']} {number(row, 'of_a_copy') or 0.0:.0%}{_mark(row)}" for row in mine
        )
        line = f"{count:,} rows, share of a copy's bandwidth: {ways}."
        fastest = max(mine, key=lambda row: number(row, "of_a_copy") or 0.0)
        eager, best = (
            median_s(mine, {"body": body}, steady=True) for body in ("eager", fastest.point["body"])
        )
        told.append(
            line
            + (
                f" {fastest.point['body']} is {eager / best:.1f} times as fast as eager."
                if eager and best
                else ""
            )
        )
    return told


def _mark(row: BenchRow) -> str:
    return " (unsteady)" if row.status == "unsteady" else ""


def of_streams(rows: Sequence[BenchRow]) -> list[str]:
    """Which cases a second stream made faster, and which not."""
    gained: list[str] = []
    others: dict[str, list[str]] = {}
    for case in values(rows, "case"):
        one, two = (
            next(iter(having(rows, {"case": case, "streams": name})), None) for name in ("one", "two")
        )
        said, gain = verdict(one, two), number(two, "gain") if two else None
        if gain is not None and (said == "faster" or said.startswith("all there is")):
            gained.append(f"{case} ({gain:.2f} times)")
        elif said:
            others.setdefault(said, []).append(str(case))
    told = [f"A second stream helped: {'; '.join(gained)}."] if gained else []
    return told + [f"{said[0].upper()}{said[1:]}: {'; '.join(cases)}." for said, cases in others.items()]


def of_clocks(rows: Sequence[BenchRow]) -> str:
    """One product by a clock that does not wait, and by the better one that does."""
    timed = {
        row.point["one product timed by"]: row
        for row in rows
        if "one product timed by" in row.point and row.times
    }
    right = next((timed[name] for name in DEVICE_CLOCKS if name in timed), None)
    wrong = timed.get(HASTY)
    if right is None or wrong is None or right.times is None or wrong.times is None:
        return ""
    return (
        f"one product takes {format_seconds(wrong.times.median)} by the host's clock without waiting, {format_seconds(right.times.median)} "
        f"by {right.point['one product timed by']}."
    )


def of_dataloader(rows: Sequence[BenchRow]) -> list[str]:
    """What the device waits by workers, pinned and not; from how many workers on it does not wait."""
    told: list[str] = []
    loaded = [row for row in having(rows, {"data": "loaded"}) if number(row, "waiting_share") is not None]
    for pinned in values(loaded, "pinned"):
        mine = having(loaded, {"pinned": pinned})
        shares = {
            workers: min(number(row, "waiting_share") or 0.0 for row in having(mine, {"workers": workers}))
            for workers in values(mine, "workers")
        }
        cells = ", ".join(f"{share:.1%} with {workers}" for workers, share in shares.items())
        told.append(
            f"{'Pinned' if pinned else 'Pageable'} memory: the device waits {cells} workers (the better number of batches ahead)."
        )
    return told


def of_accumulation(rows: Sequence[BenchRow]) -> list[str]:
    """The four totals; error and time of each order beside the plain one's."""
    totals = [
        f"{total:.4f} in {row.point['sum']} of {row.point['addend']}{' cast to fp32' if row.point['cast'] else ''}"
        for row in rows
        if "sum" in row.point and (total := number(row, "total")) is not None
    ]
    told = [f"1000 times 0.01 is {', '.join(totals)}."] if totals else []
    naive = median_s(rows, {"method": "naive"})
    orders = [
        f"{row.point['method']} {error:.1e}{_times_as_long(row, naive)}"
        for row in rows
        if "method" in row.point and (error := number(row, "relative_error")) is not None
    ]
    return told + ([f"Relative error of many floats, and the time: {', '.join(orders)}."] if orders else [])


def _times_as_long(row: BenchRow, naive: float | None) -> str:
    if row.times is None or not naive or row.point["method"] == "naive":
        return ""
    return f" in {row.times.median / naive:.1f} times naive's time"


def of_totals(rows: Sequence[BenchRow]) -> str:
    """How much further off the fp32 sum of fp16 values is than that of fp32 ones."""
    off = {
        addend: abs(total - 10.0)
        for addend in ("fp32", "fp16")
        for row in having(rows, {"sum": "fp32", "addend": addend, "cast": False})
        if (total := number(row, "total")) is not None
    }
    if len(off) < 2 or not off["fp32"]:
        return ""
    return (
        f"off by {off['fp16']:.6f} against {off['fp32']:.6f}: {off['fp16'] / off['fp32']:.0f} times as much."
    )


def of_autocast(rows: Sequence[BenchRow]) -> list[str]:
    """Which operations give fp32 whatever they are given, on each device."""
    told: list[str] = []
    for device in values(rows, "device"):
        mine = [
            row for row in having(rows, {"device": device, "autocast": "bf16"}) if "operation" in row.point
        ]
        always = [str(row.point["operation"]) for row in mine if row.numbers.get("of_low") == "fp32"]
        if mine:
            told.append(
                f"On {device}, of {len(mine)} operations on inputs that are low already, {len(always)} give fp32: {', '.join(always) or 'none'}."
            )
    return told


def of_loss(rows: Sequence[BenchRow]) -> str:
    """The dtypes of logits and loss under autocast, and in how many cases."""
    components = [row for row in rows if "component" in row.point and "dtype" in row.numbers]
    logits, losses = (
        [row for row in components if name in str(row.point["component"])] for name in ("logits", "loss")
    )
    if not losses:
        return ""
    found = (
        " or ".join(dict.fromkeys(str(row.numbers["dtype"]) for row in some)) for some in (losses, logits)
    )
    cases = ", ".join(f"{row.point['device']} {row.point['autocast']}" for row in losses)
    return "the loss is {}, the logits are {} ({}).".format(*found, cases)
