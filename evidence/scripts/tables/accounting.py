"""Tables of communication-accounting.md: the model of Stanford CS336, assignment 2, in closed form."""

import math

from trainfit.flops.layer_memory import SHARDED_SHARE, device_memory, fewest_ranks, most_tokens
from trainfit.flops.layer_times import Layers, Mesh, Way, compute_bound_tokens, ways_to_lower
from trainfit.report.layer_memory_plot import panels
from trainfit.report.plot import draw
from trainfit.report.table import markdown_grid
from trainfit.spec.units import GIB

LINEARS = Layers(hidden=16384, feed_forward=53248, blocks=126)
KEPT = {"both linears": LINEARS, "blocks alone": LINEARS.model_copy(update={"recomputed": True})}
"""Whose inputs are kept."""
LIMIT = 95 * GIB
BATCHES = (0, 500, 1_000, 4_000)
RANKS = (35, 64, 128, 256)
RATE, PEAK = 1.8e11, 4.6e14  # Bytes/s of one axis, FLOP/s: the exercise's figures for TPU v5p
CHANGES = {
    "mesh": "other mesh: {data} FSDP x {tensor} tensor parallel",
    "overlap": "FSDP and tensor traffic at the same time, on links of their own",
    "gather in 8 bits": "weights gathered in 8 bits, multiplied in bf16",
    "twice the links": "links of twice the rate",
    "two pipeline stages": "two pipeline stages, weights gathered once a step",
}


def mesh(data: int, tensor: int) -> Mesh:
    """Return the exercise's mesh: FSDP along two axes, tensor parallel along one."""
    rates = {"data_bytes_per_s": 2 * RATE, "tensor_bytes_per_s": RATE}
    return Mesh(data=data, tensor=tensor, flops_per_s=PEAK, **rates)


EXERCISE = mesh(16, 4)


def memory_plot() -> str:
    """Plot a device's memory against the number of devices."""
    ranks = [2**power for power in range(3, 11)]
    drawn = panels(LINEARS, LIMIT, (0, 1_000, 4_000), SHARDED_SHARE, ranks)
    return draw(drawn, "communication-memory", title="Memory of one device")


def fewest() -> str:
    """Table of the fewest devices by batch."""
    lines = []
    for name, layers in KEPT.items():
        whole = (1 - SHARDED_SHARE) * layers.saved_bytes_per_token / GIB
        found = [fewest_ranks(layers, LIMIT, tokens) for tokens in BATCHES]
        lines.append([name, f"3,276/n + {whole:.4f} x batch x (1 + 1/n)", *(str(one) for one in found)])
    heads = ["inputs kept of", "GiB of one of n devices", *(_tokens(one) for one in BATCHES)]
    return markdown_grid(heads, lines)


def by_devices() -> str:
    """Table of a device's memory and largest batch by the number of devices."""
    lines = []
    for ranks in RANKS:
        one = device_memory(LINEARS, ranks, 1_000)
        sizes = [one.states, one.whole_activations, one.sharded_activations, one.total]
        most = math.floor(most_tokens(LINEARS, LIMIT, ranks))
        lines.append([str(ranks), *(f"{size / GIB:.2f}" for size in sizes), f"{most:,}"])
    heads = ["devices", "states, GiB", "whole activations, GiB", "sharded activations, GiB", "total, GiB",
             "largest batch, tokens"]  # fmt: skip
    return markdown_grid(heads, lines)


def ways() -> list[Way]:
    """Return what lowers the exercise's smallest compute-bound batch."""
    others = [mesh(EXERCISE.devices // tensor, tensor) for tensor in (1, 2, 4, 8, 16, 32, 64)]
    return ways_to_lower(LINEARS, EXERCISE, others)


def lowered() -> str:
    """Table of the changes that lower the smallest compute-bound batch."""
    lines = [
        ["(16 FSDP x 4 tensor parallel, traffic in turn)", *_bound(compute_bound_tokens(LINEARS, EXERCISE))]
    ]
    for way in ways():
        name = CHANGES[way.change].format(data=way.mesh.data, tensor=way.mesh.tensor)
        lines.append([name, *_bound(way.tokens)])
    return markdown_grid(["change", "batch, tokens", "a device"], lines)


def _bound(tokens: float) -> list[str]:
    return [f"{math.ceil(tokens):,}", f"{tokens / EXERCISE.devices:.0f}"]


def _tokens(batch: int) -> str:
    return f"{batch:,} tokens" if batch else "no batch"
