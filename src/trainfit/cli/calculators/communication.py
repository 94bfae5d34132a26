"""``trainfit communication``: when a layer is bound by communication, in closed form. Free of torch."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from trainfit.cli import completion
from trainfit.cli.options import Json, at_most, finite, print_json, share, token_count
from trainfit.spec import DEFAULT_GPU
from trainfit.spec.units import GB, GIB, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from trainfit.flops.layer_times import Layers, LayerTime, Mesh, Way
    from trainfit.spec.hardware import Gpu

PEAK_HELP = "The device's dense bf16 peak; default: the catalog's."
RATE_HELP = "What a device sends along one axis; default: the catalog's link."
AXES_HELP = "Axes of a TPU's torus that the {} ranks lie along."
BATCH_HELP = "Tokens whose activations the devices keep, such as 4k (4096); several with commas between them."
MEMORY_HELP = "Memory of a device; default: the catalog's."
SHARDED_HELP = "Share of the activations that is sharded over the devices too."
RECOMPUTE_HELP = "full: of each block only the input is kept."
PLOT_HELP = "Draw a device's memory against the number of devices, as .svg, .png or .pdf."
MOST_ROWS = 6
MOST_TOKENS = 2**48
"""Of one step: a million sequences of 2**28 tokens, and exact as a float."""


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
    batch: Annotated[str | None, Option(metavar="TOKENS", help=BATCH_HELP)] = None,
    memory_gib: Annotated[
        float | None, Option(metavar="GIB", min=0.001, callback=finite, help=MEMORY_HELP)
    ] = None,
    sharded: Annotated[float, Option(metavar="SHARE", parser=share, help=SHARDED_HELP)] = 0.5,
    recompute: Annotated[Literal["none", "full"], Option(help=RECOMPUTE_HELP)] = "none",
    plot: Annotated[Path | None, Option(metavar="FILE", help=PLOT_HELP)] = None,
    json: Json = False,
) -> None:
    """When blocks of two linears are bound by communication, and how many devices hold them.

    Closed forms for FSDP, data parallel, tensor parallel and FSDP with tensor parallel, in bf16: the memory
    of a device by batch and number of devices, the smallest compute-bound batch, and what lowers it.
    """
    from trainfit.catalog.load import gpu as find_gpu
    from trainfit.flops import layer_times as closed
    from trainfit.prediction.time.peaks import peak_flops_per_s
    from trainfit.spec.errors import InputError

    row = find_gpu(gpu)
    if row.vendor == "host":
        problem, remedy = "this machine has no links between devices", "name an accelerator (trainfit gpus)"
        raise InputError(problem, remedy, field="--gpu", value=gpu)
    layers = closed.Layers(
        hidden=hidden, feed_forward=feed_forward, blocks=blocks, recomputed=recompute == "full"
    )
    peak = peak_flops_per_s(row, "bf16") if peak_flops is None else peak_flops

    def mesh_of(data: int, inner: int) -> "Mesh":
        data_rate, tensor_rate = _rates(row, data, inner, (fsdp_axes, tensor_axes), link_rate)
        rates = {"data_bytes_per_s": data_rate, "tensor_bytes_per_s": tensor_rate}
        return closed.Mesh(data=data, tensor=inner, flops_per_s=peak, **rates)

    mesh = mesh_of(fsdp, tensor)
    memory = _Memory(row, layers, mesh, _batches(batch), memory_gib, sharded)
    after, overlapped = (closed.compute_bound_tokens(layers, mesh, overlapped=each) for each in (False, True))
    others = [mesh_of(mesh.devices // inner, inner) for inner in _divisors(mesh.devices)]
    ways = closed.ways_to_lower(layers, mesh, others)
    if plot is not None:
        memory.plot(plot)
    if not json:
        _show(row, layers, mesh, after, overlapped, memory)
        _show_ways(ways, mesh)
        return
    print_json({
        "params": layers.params, "state_bytes": layers.state_bytes,
        "saved_bytes_per_token": layers.saved_bytes_per_token,
        "devices_to_hold_states": {name: count for name, count in _holders(row, layers, memory_gib)},
        **memory.as_json(),
        "compute_bound_tokens": _finite(after), "overlapped_compute_bound_tokens": _finite(overlapped),
        "lowered_by": [way.model_dump() for way in ways],
        "most_tensor_ranks": closed.most_tensor_ranks(layers, mesh), **mesh.model_dump(),
    })  # fmt: skip


def _batches(text: str | None) -> list[int]:
    """Return the batches of ``--batch``, in tokens."""
    found = [token_count(part) for part in (text or "").split(",") if part.strip()]
    if text is not None and (not found or min(found) < 1):
        raise typer.BadParameter(f"{text!r} is no number of tokens: write --batch 4096 or 1k,4k")
    if max(found, default=0) > MOST_TOKENS:
        raise typer.BadParameter(f"--batch {text}: write at most {MOST_TOKENS:,} tokens")
    return list(dict.fromkeys(found))


def _divisors(number: int) -> list[int]:
    return [
        one for one in range(1, math.isqrt(number) + 1) if number % one == 0 for one in (one, number // one)
    ]


class _Memory:
    """What a device holds, by the number of devices and by the batch."""

    def __init__(
        self, gpu: "Gpu", layers: "Layers", mesh: "Mesh", batches: list[int], gib: float | None, share: float
    ):
        from trainfit.flops.layer_memory import fewest_ranks

        self.layers, self.share, self.batches, self.given_gib = layers, share, batches, gib
        self.limit = gpu.memory_bytes if gib is None else gib * GIB
        self.fewest = {tokens: fewest_ranks(layers, self.limit, tokens, share) for tokens in (0, *batches)}
        least = [one for one in self.fewest.values() if one is not None]
        first = max(1, 2 ** math.ceil(math.log2(least[0]))) if least else 1
        doubled = [first * 2**power for power in range(MOST_ROWS)]
        own = [mesh.devices] if mesh.devices > 1 else []
        self.ranks = sorted({*least, *own, *doubled[: MOST_ROWS - len(least) - len(own)]})

    def total(self, ranks: int, tokens: int) -> float:
        from trainfit.flops.layer_memory import device_memory

        return device_memory(self.layers, ranks, tokens, self.share).total

    def most(self, ranks: int) -> int:
        from trainfit.flops.layer_memory import most_tokens

        return math.floor(most_tokens(self.layers, self.limit, ranks, self.share))

    def formula(self) -> str:
        """Return the bytes of one of n devices, in GiB, with ``batch`` in tokens."""
        saved = self.layers.saved_bytes_per_token / GIB
        parts = [f"{self.layers.state_bytes / GIB:,.4g}/n"]
        if self.share < 1:
            parts.append(f"{(1 - self.share) * saved:.4g} x batch")
        if self.share:
            parts.append(f"{self.share * saved:.4g} x batch/n")
        return " + ".join(parts)

    def as_json(self) -> dict[str, Any]:
        from trainfit.flops.layer_memory import device_memory

        return {
            "device_bytes": self.limit, "sharded_share": self.share,
            "fewest_devices": [{"tokens": tokens, "devices": one} for tokens, one in self.fewest.items()],
            "device_memory": [
                {"devices": ranks, "tokens": tokens, "total": self.total(ranks, tokens),
                 **device_memory(self.layers, ranks, tokens, self.share).model_dump()}
                for ranks in self.ranks for tokens in self.batches
            ],
            "most_tokens": [{"devices": ranks, "tokens": self.most(ranks)} for ranks in self.ranks],
        }  # fmt: skip

    def show(self) -> None:
        from trainfit.report.console import console, heading, rows

        out = console()
        heading(out, "Memory of one of n devices, for a batch in tokens")
        out.print(f"  {self.formula()} GiB")
        limit = f"{self.limit / GIB:,.4g} GiB"
        for tokens, ranks in self.fewest.items():
            batch = f"with {tokens:,} tokens" if tokens else "without activations"
            found = (
                "on no number of devices"
                if ranks is None
                else f"from {ranks:,} {'device' if ranks == 1 else 'devices'} on"
            )
            out.print(f"  fits in {limit} {batch}: {found}")
        heads = ["devices", *(f"{tokens:,} tokens" for tokens in self.batches), "largest batch"]
        lines = [
            [
                f"{ranks:,}",
                *(self._cell(ranks, tokens) for tokens in self.batches),
                f"{self.most(ranks):,} tokens",
            ]
            for ranks in self.ranks
        ]
        out.print()
        rows(out, [heads, *lines], *["right"] * len(heads))
        if any("!" in cell for line in lines for cell in line):
            out.print(f"  ! more than {limit}")

    def _cell(self, ranks: int, tokens: int) -> str:
        total = self.total(ranks, tokens)
        return f"{total / GIB:,.4g} GiB{' ' if total <= self.limit else '!'}"

    def plot(self, path: Path) -> None:
        """Draw a device's memory against the number of devices, a line for each batch."""
        from trainfit.report.layer_memory_plot import panels
        from trainfit.report.plot import check_plot_file, plot_file

        form = check_plot_file(path)
        middle = math.floor(math.log2(self.fewest[0] or 1))
        ranks = [2**power for power in range(max(0, middle - 2), middle + 6)]
        drawn = panels(self.layers, self.limit, [0, *self.batches], self.share, ranks)
        path.write_bytes(plot_file(drawn, "layer-memory", form))


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


def _holders(gpu: "Gpu", layers: "Layers", given_gib: float | None) -> list[tuple[str, int]]:
    """Return the devices that hold the states: of the given memory, else of a data sheet's GB.

    A data sheet's GB are read both as 10**9 and as 2**30 bytes.
    """
    from trainfit.flops.layer_times import devices_to_hold

    if given_gib is not None:
        return [(f"{given_gib:g} GiB", devices_to_hold(layers.state_bytes, given_gib * GIB))]
    if gpu.memory_bytes % GIB:
        return [(f"{gpu.memory_bytes / GB:g} GB", devices_to_hold(layers.state_bytes, gpu.memory_bytes))]
    size = gpu.memory_bytes // GIB
    return [
        (f"{size} {unit}", devices_to_hold(layers.state_bytes, size * each))
        for unit, each in (("GB", GB), ("GiB", GIB))
    ]


def _finite(tokens: float) -> float | None:
    return tokens if math.isfinite(tokens) else None


def _show(
    gpu: "Gpu", layers: "Layers", mesh: "Mesh", after: float, overlapped: float, memory: _Memory
) -> None:
    from trainfit.flops.layer_times import layer_time, most_tensor_ranks
    from trainfit.report.console import console, heading, rows

    out = console()
    devices = f"{mesh.devices} x {gpu.name}: {mesh.data} FSDP x {mesh.tensor} tensor parallel"
    out.print(f"{layers.blocks} x two linears, {layers.hidden:,} x {layers.feed_forward:,}, on {devices}")
    holders = ", ".join(f"{count} of {size}" for size, count in _holders(gpu, layers, memory.given_gib))
    states = f"{layers.state_bytes / GIB:,.4g} GiB" if layers.state_bytes >= GIB else ""
    heading(out, "Memory")
    rows(out, [
        ["parameters", format_count(layers.params), ""],
        ["states", states or format_bytes(layers.state_bytes),
         "fp32 master weights, gradients and two Adam moments, 16 B a parameter"],
        ["to hold the states", holders, "devices, sharded evenly"],
        ["saved a token", f"{layers.saved_bytes_per_token / GIB:.4g} GiB",
         "bf16 inputs of the blocks alone" if layers.recomputed else "bf16 inputs of both linears"],
    ], "left", "right", "wrap")  # fmt: skip
    memory.show()
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


WAYS = {
    "mesh": "{data} FSDP x {tensor} tensor parallel",
    "overlap": "FSDP and tensor traffic at the same time, on links of their own",
    "gather in 8 bits": "weights gathered in 8 bits, gradients reduced in bf16",
    "twice the links": "links of twice the rate",
    "two pipeline stages": "two pipeline stages, weights gathered once a step",
}


def _show_ways(ways: "list[Way]", mesh: "Mesh") -> None:
    from trainfit.report.console import console, heading, rows

    if not ways:
        return
    out = console()
    heading(out, "What lowers that batch, each alone")
    rows(out, [
        [WAYS[way.change].format(data=way.mesh.data, tensor=way.mesh.tensor), *_batch(way.tokens, mesh)]
        for way in ways
    ], "wrap", "right", "right")  # fmt: skip
