"""``trainfit communication``: when a layer is bound by communication, in closed form. Free of torch."""

import math
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from trainfit.cli import completion
from trainfit.cli.options import Json, at_most, finite, print_json
from trainfit.spec import DEFAULT_GPU
from trainfit.spec.units import GB, GIB, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from trainfit.flops.layer_times import Layers, LayerTime, Mesh
    from trainfit.spec.hardware import Gpu

PEAK_HELP = "The device's dense bf16 peak; default: the catalog's."
RATE_HELP = "What a device sends along one axis; default: the catalog's link."
AXES_HELP = "Axes of a TPU's torus that the {} ranks lie along."


def run(
    hidden: Annotated[
        int, Option(min=1, callback=at_most, metavar="D", help="Input size of a block's first linear.")
    ],
    feed_forward: Annotated[
        int, Option(min=1, callback=at_most, metavar="F", help="Output size of the first linear.")
    ],
    blocks: Annotated[int, Option(min=1, callback=at_most, metavar="L", help="Blocks of two linears.")] = 1,
    gpu: Annotated[
        str, Option(metavar="NAME", help="An accelerator of the catalog.", autocompletion=completion.gpus)
    ] = DEFAULT_GPU,
    fsdp: Annotated[int, Option(min=1, callback=at_most, metavar="X", help="FSDP ranks, or replicas.")] = 1,
    tensor: Annotated[int, Option(min=1, callback=at_most, metavar="Y", help="Tensor-parallel ranks.")] = 1,
    fsdp_axes: Annotated[
        int, Option(min=1, callback=at_most, metavar="M", help=AXES_HELP.format("FSDP"))
    ] = 1,
    tensor_axes: Annotated[
        int, Option(min=1, callback=at_most, metavar="M", help=AXES_HELP.format("tensor-parallel"))
    ] = 1,
    peak_flops: Annotated[
        float | None, Option(metavar="FLOP/S", min=1, callback=finite, help=PEAK_HELP)
    ] = None,
    link_rate: Annotated[
        float | None, Option(metavar="BYTES/S", min=1, callback=finite, help=RATE_HELP)
    ] = None,
    json: Json = False,
) -> None:
    """When blocks of two linears are bound by communication.

    Closed forms for FSDP, data parallel, tensor parallel and FSDP with tensor parallel, in bf16; also the
    memory that the states need.
    """
    from trainfit.catalog.load import gpu as find_gpu
    from trainfit.flops import layer_times as closed
    from trainfit.prediction.time.peaks import peak_flops_per_s
    from trainfit.spec.errors import InputError

    row = find_gpu(gpu)
    if row.vendor == "host":
        problem, remedy = "this machine has no links between devices", "name an accelerator (trainfit gpus)"
        raise InputError(problem, remedy, field="--gpu", value=gpu)
    layers = closed.Layers(hidden=hidden, feed_forward=feed_forward, blocks=blocks)
    data_rate, tensor_rate = _rates(row, fsdp, tensor, (fsdp_axes, tensor_axes), link_rate)
    mesh = closed.Mesh(
        data=fsdp,
        tensor=tensor,
        flops_per_s=peak_flops_per_s(row, "bf16") if peak_flops is None else peak_flops,
        data_bytes_per_s=data_rate,
        tensor_bytes_per_s=tensor_rate,
    )
    after, overlapped = (closed.compute_bound_tokens(layers, mesh, overlapped=each) for each in (False, True))
    if not json:
        _show(row, layers, mesh, after, overlapped)
        return
    print_json({
        "params": layers.params, "state_bytes": layers.state_bytes,
        "saved_bytes_per_token": layers.saved_bytes_per_token,
        "devices_to_hold_states": {name: count for name, count in _holders(row, layers)},
        "compute_bound_tokens": _finite(after), "overlapped_compute_bound_tokens": _finite(overlapped),
        "most_tensor_ranks": closed.most_tensor_ranks(layers, mesh), **mesh.model_dump(),
    })  # fmt: skip


def _rates(
    gpu: "Gpu", fsdp: int, tensor: int, axes: tuple[int, int], link_rate: float | None
) -> tuple[float, float]:
    """Return the bytes/s of a rank to its FSDP group and to its tensor-parallel group, which is the inner."""
    from trainfit.catalog.load import link
    from trainfit.prediction.communication import ring

    most = link(gpu.link).axes
    for option, one in zip(("--fsdp-axes", "--tensor-axes"), axes, strict=True):
        if one > most:
            raise typer.BadParameter(f"{option} is {one}, and the links of {gpu.name} build {most}")
    data, inner = ((fsdp, fsdp * tensor - tensor + 1), (tensor, tensor))
    rates = [link_rate or ring(*group, gpu).bytes_per_s for group in (data, inner)]
    return rates[0] * axes[0], rates[1] * axes[1]


def _holders(gpu: "Gpu", layers: "Layers") -> list[tuple[str, int]]:
    """Return the devices that hold the states, of a data sheet's GB as 10**9 and as 2**30 bytes."""
    from trainfit.flops.layer_times import devices_to_hold

    if gpu.memory_bytes % GIB:
        return [(f"{gpu.memory_bytes / GB:g} GB", devices_to_hold(layers.state_bytes, gpu.memory_bytes))]
    size = gpu.memory_bytes // GIB
    return [
        (f"{size} {unit}", devices_to_hold(layers.state_bytes, size * each))
        for unit, each in (("GB", GB), ("GiB", GIB))
    ]


def _finite(tokens: float) -> float | None:
    return tokens if math.isfinite(tokens) else None


def _show(gpu: "Gpu", layers: "Layers", mesh: "Mesh", after: float, overlapped: float) -> None:
    from trainfit.flops.layer_times import layer_time, most_tensor_ranks
    from trainfit.report.console import console, heading, rows

    out = console()
    devices = f"{mesh.devices} x {gpu.name}: {mesh.data} FSDP x {mesh.tensor} tensor parallel"
    out.print(f"{layers.blocks} x two linears, {layers.hidden:,} x {layers.feed_forward:,}, on {devices}")
    holders = ", ".join(f"{count} of {size}" for size, count in _holders(gpu, layers))
    states = f"{layers.state_bytes / GIB:,.4g} GiB" if layers.state_bytes >= GIB else ""
    heading(out, "Memory")
    rows(out, [
        ["parameters", format_count(layers.params), ""],
        ["states", states or format_bytes(layers.state_bytes),
         "fp32 master weights, gradients and two Adam moments, 16 B a parameter"],
        ["to hold the states", holders, "devices, sharded evenly"],
        ["saved a token", f"{layers.saved_bytes_per_token / GIB:.4g} GiB", "bf16 inputs of both linears"],
    ], "left", "right", "wrap")  # fmt: skip
    if mesh.devices == 1:
        return
    heading(out, "Smallest compute-bound global batch, traffic overlapping the computation")
    rows(out, [
        ["FSDP and tensor parallel in turn", *_batch(after, mesh)],
        ["both at the same time", *_batch(overlapped, mesh)],
    ], "left", "right", "wrap")  # fmt: skip
    tokens = after if 0 < after < math.inf else float(mesh.devices)
    _times(layer_time(layers, mesh, tokens), mesh, tokens)
    if mesh.tensor > 1:
        most = most_tensor_ranks(layers, mesh)
        out.print(f"\nTensor parallel is bound by communication above {most:.3g} ranks, whatever the batch.")


def _batch(tokens: float, mesh: "Mesh") -> list[str]:
    if not tokens:
        return ["any", ""]
    if not math.isfinite(tokens):
        return ["none", "tensor-parallel traffic takes longer than the computation"]
    return [f"{math.ceil(tokens):,} tokens", f"{tokens / mesh.devices:,.0f} a device"]


def _times(one: "LayerTime", mesh: "Mesh", tokens: float) -> None:
    from trainfit.report.console import console, heading, rows

    out = console()
    heading(out, f"Forward of one block at {math.ceil(tokens):,} tokens; the backward takes twice as long")
    lines = [["compute", format_seconds(one.compute_s), f"{mesh.flops_per_s / 1e12:,.4g} TFLOP/s a device"]]
    if mesh.data > 1:
        rate = f"weights gathered at {mesh.data_bytes_per_s / 1e9:,.4g} GB/s"
        lines.append(["FSDP", format_seconds(one.data_s), rate])
    if mesh.tensor > 1:
        rate = f"activations gathered and scattered at {mesh.tensor_bytes_per_s / 1e9:,.4g} GB/s"
        lines.append(["tensor parallel", format_seconds(one.tensor_s), rate])
    rows(out, lines, "left", "right", "wrap")
