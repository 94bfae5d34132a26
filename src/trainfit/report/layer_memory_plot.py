"""A device's memory against the number of devices, for blocks of two linears."""

from collections.abc import Sequence

from trainfit.flops.layer_memory import device_memory
from trainfit.flops.layer_times import Layers
from trainfit.report.plot import Panel, Series
from trainfit.spec.units import GIB


def panels(
    layers: Layers, limit_bytes: float, batches: Sequence[int], share: float, ranks: Sequence[int]
) -> list[Panel]:
    """Return one panel: a line for each batch over ``ranks``, and the limit as a line across."""
    lines = [
        Series(
            f"{tokens:,} tokens" if tokens else "without activations",
            [device_memory(layers, number, tokens, share).total / GIB for number in ranks],
            x=list(ranks),
        )
        for tokens in batches
    ]
    title = f"Memory of one device; the line is {limit_bytes / GIB:,.4g} GiB"
    ticks = {float(number): f"{number:,}" for number in ranks}
    limit = [limit_bytes / GIB]
    return [Panel(lines, title, "devices", "GiB", x_log=True, y_log=True, x_ticks=ticks, lines=limit)]
