"""``trainfit gpus`` and ``trainfit models``: list the catalog."""

from typing import TYPE_CHECKING, Annotated

import typer

from trainfit.cli import completion
from trainfit.cli.options import Json, print_json

if TYPE_CHECKING:
    from trainfit.catalog.load import ModelRow
    from trainfit.spec.hardware import Gpu, PeakDtype

ABSENT = "-"  # No such dtype in hardware, or no dated price
BASIS = {
    "measured": "operations and steps were measured on it",
    "modelled": "predicted by the same rules, with an H200's shares of the peak",
    "accounted": "mfu and communication only",
}
ONE_HELP = "One row only, with its source."
GpuName = Annotated[str | None, typer.Argument(metavar="NAME", help=ONE_HELP, autocompletion=completion.gpus)]
ModelName = Annotated[
    str | None, typer.Argument(metavar="NAME", help=ONE_HELP, autocompletion=completion.models)
]


def gpus(name: GpuName = None, json: Json = False) -> None:
    """List the catalog's accelerators, or show one."""
    from trainfit.catalog import load as catalog
    from trainfit.report.console import console, rows

    found = [catalog.gpu(name)] if name else list(catalog.gpus().values())
    if json:
        data = [{**gpu.model_dump(mode="json"), "basis": gpu.basis} for gpu in found]
        print_json(data[0] if name else data)
        return
    out = console()
    head = ["name", "memory", "bandwidth", "bf16 TFLOP/s", "fp8", "$/h", "basis"]
    rows(out, [head, *map(_row, found)], "left", "right", "right", "right", "right", "right", "left")
    if name:
        _details(found[0])
    else:
        meaning = "not in hardware, or no price that could be dated; trainfit gpus NAME shows the sources"
        rows(out, [[ABSENT, meaning], *([name, BASIS[name]] for name in BASIS)], "left", "wrap")


def _row(gpu: "Gpu") -> list[str]:
    bandwidth = ABSENT if gpu.memory_bytes_per_s is None else f"{gpu.memory_bytes_per_s / 1e9:,.0f} GB/s"
    price = ABSENT if gpu.price_per_hour is None else f"{gpu.price_per_hour:.2f}"
    memory = f"{gpu.usable_bytes / 2**30:.1f} GiB"
    return [gpu.name, memory, bandwidth, _peak(gpu, "bf16"), _peak(gpu, "fp8"), price, gpu.basis]


def _peak(gpu: "Gpu", dtype: "PeakDtype") -> str:
    peak = gpu.peak_flops_per_s.get(dtype)
    return ABSENT if peak is None else f"{peak / 1e12:,.0f}"


def _details(gpu: "Gpu") -> None:
    from trainfit.catalog.load import link
    from trainfit.report.console import console, heading, rows
    from trainfit.spec.units import format_bytes

    out = console()
    heading(out, gpu.title)
    tera = {dtype: peak / 1e12 for dtype, peak in gpu.peak_flops_per_s.items()}
    peaks = ", ".join(
        f"{dtype} {f'{peak:,.0f}' if peak >= 1000 else f'{peak:.4g}'}" for dtype, peak in tera.items()
    )
    speed = "none"
    if gpu.link != "none":
        rate = f"{link(gpu.link).bytes_per_s / 1e9:,.4g} GB/s in one direction"
        speed = f"{gpu.link}, {rate}; {gpu.gpus_per_host} GPUs a host"
    network = "the same links" if gpu.vendor == "google" else ABSENT
    if gpu.vendor in ("nvidia", "amd"):
        rate = f"{link(gpu.network).bytes_per_s / 1e9:,.4g} GB/s in one direction"
        network = f"{gpu.network}, {rate}, for each GPU; an assumption"
    price = "none that could be dated; give your own: --set hardware.price_per_hour=USD"
    if (source := gpu.price_source) is not None:
        price = f"{source.url} ({source.accessed}): {source.note}"
    sustained = ABSENT if gpu.basis == "accounted" else f"the shares of {gpu.reference}"
    if (shares := gpu.sustained) is not None:
        sustained = f"{shares.products:.0%} of the 16-bit peak, {shares.mma:.0%} in flash attention; "
        sustained += f"{shares.memory:.0%} of the bandwidth"
    lines = [
        ["architecture", f"{gpu.vendor} {gpu.architecture}"],
        ["dense peaks, TFLOP/s", peaks or ABSENT],
        ["sustained in a step", sustained],
        ["data sheet's memory", f"{gpu.memory_bytes / 1e9:.4g} GB"],
        ["a process may allocate", format_bytes(gpu.usable_bytes)],
        ["link", speed],
        ["between hosts", network],
        ["outside the allocator", _outside(gpu)],
        ["source", f"{gpu.source.url or 'read off this machine'} ({gpu.source.accessed})"],
        ["price", price],
    ]
    rows(out, lines, "left", "wrap")


def _outside(gpu: "Gpu") -> str:
    """Return what the device holds that PyTorch's allocator does not, and where that was measured."""
    from trainfit.catalog.load import device_memory
    from trainfit.spec.units import MIB

    if gpu.basis == "accounted":
        return ABSENT
    known = device_memory(gpu)
    context, nccl, group = (
        f"{num_bytes / MIB:,.0f} MiB"
        for num_bytes in (known.context_bytes, known.nccl_bytes, known.communicator_bytes)
    )
    of = "measured on it" if gpu.device_memory else f"as measured on {gpu.reference}"
    return f"{context}; with several GPUs {nccl} for NCCL and {group} for each group; {of}"


def _active_params(row: "ModelRow") -> int | None:
    """Return the parameters that one token meets; None: as many as there are, or unknown."""
    from trainfit.flops.closed_form import active_params
    from trainfit.spec.errors import InputError

    if row.published_params is None:
        return None
    try:
        found = active_params(row.config, row.published_params)
    except InputError:  # No closed form of its layers.
        return None
    return None if found == row.published_params else found


def _active(row: "ModelRow") -> str:
    from trainfit.spec.units import format_count

    active = _active_params(row)
    return "" if active is None else format_count(active)


def models(name: ModelName = None, json: Json = False) -> None:
    """List the catalog's models, or show one."""
    from trainfit.catalog import load as catalog
    from trainfit.report.console import console, heading, rows

    found = [catalog.model(name)] if name else list(catalog.models().values())
    if json:
        data = [{**row.model_dump(mode="json"), "active_params": _active_params(row)} for row in found]
        print_json(data[0] if name else data)
        return
    out = console()
    head = ["name", "family", "parameters", "active"]
    lines = [head, *([row.name, row.family, row.published, _active(row)] for row in found)]
    rows(out, lines, "left", "left", "right", "right")
    if name:
        heading(out, "config.json")
        rows(out, [[key, str(value)] for key, value in found[0].config.items()], "left", "wrap")
        out.print(f"\n  {found[0].source.url} ({found[0].source.accessed})", soft_wrap=True)
