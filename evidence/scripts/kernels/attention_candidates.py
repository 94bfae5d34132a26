"""Configurations of FlashAttention that attention_tune.py compares, and the process that runs them.

``python -m evidence.scripts.kernels.attention_candidates check|time NAME...`` prints one JSON line a name. A
candidate is one direction of one implementation on one shape: causal, bf16, one sequence of 16 heads, each
head with its own keys.
"""

from __future__ import annotations

import faulthandler
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from evidence.scripts.kernels.error_location import where_wrong
from trainfit.bench.harness.stopwatch import Stopwatch, stopwatch_of
from trainfit.bench.harness.timing import Rule, take
from trainfit.kernels.flash_attention import triton_launch as flash_attention_launch
from trainfit.kernels.flash_attention.dispatch import FORWARD, backward_groups
from trainfit.kernels.flash_attention.hopper import launch as flash_attention_tma
from trainfit.kernels.flash_attention.hopper.launch import Groups, GroupsBackward
from trainfit.kernels.flash_attention.triton_launch import Tiles

HEADS = 16
LENGTHS = {128: 8192, 64: 16384}
"""Head size -> tokens: the two shapes that the goals name."""
SMALL = [(2, 4, 2, 777, 777), (1, 4, 2, 200, 520), (1, 4, 2, 520, 200)]
"""b, h, k, n, m of the checks against fp64; each causal and not.

Triton compiles anew for sizes of 1 and for multiples of 16, so these share one kernel.
"""
RUN_LIMIT_S = 30
"""Of kernels that are compiled and launched; a right one takes milliseconds."""
RULE = Rule(warmup=3, min_samples=12, max_samples=20, cap_s=4.0, hide=True, rest_s=0.015)
"""How a candidate is timed: a rest of eight times a backward before each sample, as `bench flash` has it."""
FARTHEST = 0.02
"""Of the largest entry: how far bf16 results of two right kernels may be apart."""


How = Tiles | Groups | GroupsBackward | str | None
"""A configuration of ours; None for the kernels in Triton as they are; or the name of one of PyTorch's."""


@dataclass(frozen=True)
class Candidate:
    """One direction of one implementation, causal, with heads of size d.

    The passes of a backward in Triton are also compared alone: ``keys`` (dK and dV) and ``queries`` (dQ).
    """

    direction: str
    d: int
    how: How

    @property
    def name(self) -> str:
        return f"{self.direction} d{self.d} {_spelled(self.how)}"


def _spelled(how: How) -> str:
    if isinstance(how, Tiles):
        registers = f" r{how.max_registers}" if how.max_registers else ""
        tile = f"{how.block_m}x{how.block_n} w{how.warps} s{how.stages} heads{how.heads_at_once}"
        return f"triton pointers {tile}{registers}"
    if isinstance(how, Groups):
        return f"gluon {how.groups}x64x{how.block_n} s{how.stages} heads{how.heads_at_once}"
    if isinstance(how, GroupsBackward):
        return f"gluon s{how.stages} heads{how.heads_at_once}"
    return how or "triton pointers"


def candidates() -> list[Candidate]:
    """All that is compared, the public ones first."""
    made: list[Candidate] = []
    for d in LENGTHS:
        for direction in ("forward", "backward"):
            made += [Candidate(direction, d, how) for how in ("flash", "cudnn", "flex", None)]
        made += [Candidate("forward", d, how) for how in FORWARDS[d]]
        made.append(Candidate("backward", d, backward_groups(d, LENGTHS[d], group=1)))
    return made + [Candidate(*key, tiles) for key, each in IN_TRITON.items() for tiles in each]


IN_TRITON: dict[tuple[str, int], list[Tiles]] = {
    ("forward", 128): [Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3, 4), Tiles(64, 64, 4, 3, 4)],
    ("keys", 128): [Tiles(64, 128, 8, 3), Tiles(64, 128, 8, 2), Tiles(64, 64, 4, 2)],
    ("queries", 128): [Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2)],
    ("forward", 64): [Tiles(128, 64, 4, 4, 4), Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 3)],
    ("keys", 64): [Tiles(32, 128, 4, 3), Tiles(64, 64, 4, 2)],
    ("queries", 64): [Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 2)],
}  # fmt: skip
"""Direction and head size -> neighbours of the tiles in use, for another GPU; of the backward's passes those
in use too."""


FORWARDS: dict[int, list[Groups]] = {
    128: [
        *(replace(FORWARD[128], heads_at_once=heads) for heads in (8, 4, 2, 16)),
        replace(FORWARD[128], block_n=64, stages=4),
    ],
    64: [*(replace(FORWARD[64], heads_at_once=heads) for heads in (8, 4)), replace(FORWARD[64], stages=3)],
}
"""Head size -> the forward in use, and its neighbours for another GPU of the family."""


# -- running one --

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""q, k, v and the gradient of the output."""


def _tensors(b: int, h: int, k: int, n: int, m: int, d: int, growing: bool = False) -> Tensors:
    """``growing``: earlier keys have larger scores, so maxima grow while a kernel walks backwards."""
    torch.manual_seed(n + m + d)
    shapes = ((b, h, n, d), (b, k, m, d), (b, k, m, d), (b, h, n, d))
    q, k_, v, gradient = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    if growing:
        k_ = k_ * torch.linspace(8, 0.25, m, device="cuda", dtype=torch.bfloat16)[:, None]
    return q, k_, v, gradient


def _prepared(candidate: Candidate, tensors: Tensors, is_causal: bool) -> Callable[[], tuple[Tensor, ...]]:
    """Return a call that computes the candidate's direction once: the output, or its part of dq, dk, dv."""
    q, k, v, gradient = tensors
    how, scale = candidate.how, 1 / math.sqrt(q.shape[-1])
    if isinstance(how, str):
        return _public(how, candidate.direction, tensors, is_causal)
    if candidate.direction == "forward":
        return lambda: _forward(how, q, k, v, is_causal, scale)[:1]
    out, lse = flash_attention_launch.triton_forward(q, k, v, is_causal, scale)
    if isinstance(how, Tiles):
        inputs = (q, k, v, gradient, *flash_attention_launch.triton_prepared(gradient, out, lse))
        return lambda: _pass(candidate.direction, how, inputs, is_causal, scale)
    if how is None:
        return lambda: flash_attention_launch.triton_backward(gradient, q, k, v, out, lse, is_causal, scale)
    assert isinstance(how, GroupsBackward), candidate
    return lambda: flash_attention_tma.backward(gradient, q, k, v, out, lse, is_causal, scale, how)


def _forward(
    how: How, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if isinstance(how, Groups):
        return flash_attention_tma.gluon_forward(q, k, v, is_causal, scale, how)
    tiles = how if isinstance(how, Tiles) else None
    return flash_attention_launch.triton_forward(q, k, v, is_causal, scale, tiles)


def _pass(
    direction: str, how: Tiles, inputs: tuple[Tensor, ...], is_causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """dk and dv, or dq, by one kernel."""
    if direction == "keys":
        return flash_attention_launch.triton_key_gradients(inputs, is_causal, scale, how)
    return (flash_attention_launch.triton_query_gradient(inputs, is_causal, scale, how),)


MADE = {"backward": slice(0, 3), "queries": slice(0, 1), "keys": slice(1, 3)}
"""Direction -> which of dq, dk and dv."""


@cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _public(name: str, direction: str, tensors: Tensors, is_causal: bool) -> Callable[[], tuple[Tensor, ...]]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    grouped = q.shape[1] != k.shape[1]
    if name == "flex":
        n, m = q.shape[2], k.shape[2]
        mask = create_block_mask(lambda b, h, i, j: i + (m - n) >= j, None, None, n, m) if is_causal else None

        def run() -> Tensor:
            return _flex()(q, k, v, block_mask=mask, enable_gqa=grouped)
    else:
        backend = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[name]

        def run() -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=is_causal, enable_gqa=grouped
                )

    if direction == "forward":

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (run(),)

        return forward
    out, made = run(), MADE[direction]
    return lambda: torch.autograd.grad(out, (q, k, v), tensors[3], retain_graph=True)[made]


def _exact(tensors: Tensors, is_causal: bool, dtype: torch.dtype) -> dict[str, tuple[Tensor, ...]]:
    """softmax(QK^T / sqrt d) V written out in ``dtype``, and its gradients."""
    q, k, v = (x.to(dtype).requires_grad_() for x in tensors[:3])
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT / math.sqrt(q.shape[-1])
    if is_causal:
        n, m = scores.shape[-2:]
        unseen = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n).logical_not()
        scores = scores.masked_fill(unseen, -math.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(group, 1)
    gradients = torch.autograd.grad(out, (q, k, v), tensors[3].to(dtype))
    return {"forward": (out.detach(),)} | {direction: gradients[made] for direction, made in MADE.items()}


def _largest(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    return [(a.double() - b.double()).abs().max().item() for a, b in zip(found, exact, strict=True)]


def check(candidate: Candidate) -> dict[str, Any]:
    """Compare errors on small odd shapes with those of eager bf16 (at most twice as large is right), and near
    PyTorch's flash on the timed shape, three times over: a race shows rarely. ``error`` says of every wrong
    shape where.

    Public implementations are run on the timed shape only.
    """
    row: dict[str, Any] = {"name": candidate.name, "errors": []}
    wrong: list[str] = []
    for shape in SMALL if not isinstance(candidate.how, str) else []:
        # Of growing maxima the forward in Gluon shrinks nothing that it need not.
        grows = (False, True) if isinstance(candidate.how, Groups) else (False,)
        for is_causal, growing in product((True, False), grows):
            tensors = _tensors(*shape, candidate.d, growing)
            exact = _exact(tensors, is_causal, torch.float64)[candidate.direction]
            eager = _largest(_exact(tensors, is_causal, torch.bfloat16)[candidate.direction], exact)
            found = _ended(_prepared(candidate, tensors, is_causal)())
            ours = _largest(found, exact)
            row["errors"].append({"shape": shape, "causal": is_causal, "ours": ours, "eager": eager})
            wrong += _wrong(
                candidate, f"{shape} causal {is_causal}", found, exact, [2 * b + 1e-6 for b in eager]
            )
    tensors = _timed_tensors(candidate)
    wanted = _public("flash", candidate.direction, tensors, True)()
    run = _prepared(candidate, tensors, True)
    allowed = [FARTHEST * b.abs().max().item() for b in wanted]
    for turn in range(3):
        wrong += _wrong(
            candidate, f"the timed shape, run {turn}, against flash", _ended(run()), wanted, allowed
        )
    return {**row, "error": " | ".join(wrong)} if wrong else row


def _ended(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Wait for the launched kernels; if one hangs, end this process with a traceback to here."""
    faulthandler.dump_traceback_later(RUN_LIMIT_S, exit=True)
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()
    return results


def _wrong(
    candidate: Candidate,
    shape: str,
    found: tuple[Tensor, ...],
    wanted: tuple[Tensor, ...],
    allowed: list[float],
) -> list[str]:
    """What is wrong with the results on a shape, in words."""
    names = ("out",) if candidate.direction == "forward" else ("dq", "dk", "dv")[MADE[candidate.direction]]
    lines = map(where_wrong, names, found, wanted, allowed)
    return [f"wrong at {shape}: {line}" for line in lines if line]


def _timed_tensors(candidate: Candidate) -> Tensors:
    n = LENGTHS[candidate.d]
    return _tensors(1, HEADS, HEADS, n, n, candidate.d)


def time(candidate: Candidate) -> dict[str, Any]:
    """Return median seconds and TFLOP/s.

    Counted: 2 products forward, 5 backward, half masked (Dao, 2023, section 4.1).
    A pass alone: those that it does, 4 for dK and dV, 3 for dQ. Where most samples were lost to held clocks:
    an error, no number.
    """
    run = _prepared(candidate, _timed_tensors(candidate), True)
    taken = take(lambda lap: run(), _stopwatch(), RULE)
    times = taken.spread()
    if times is None:
        return {"name": candidate.name, "error": f"{taken.status}: {taken.message}"}
    products = {"forward": 2, "backward": 5, "keys": 4, "queries": 3}[candidate.direction]
    flops = (
        products * HEADS * LENGTHS[candidate.d] ** 2 * candidate.d
    )  # 2 a multiply-add, half of them masked
    return {
        "name": candidate.name, "direction": candidate.direction, "d": candidate.d, "n": LENGTHS[candidate.d],
        "heads": HEADS, "median_s": times.median, "p10_s": times.low, "p90_s": times.high,
        "samples": len(times.samples),
        "discarded": taken.discarded, "status": taken.status, "tflops_per_s": flops / times.median * 1e-12,
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
    }  # fmt: skip


@cache
def _stopwatch() -> Stopwatch:
    """One for all candidates of this process: it holds what it writes over the cache."""
    return stopwatch_of(torch.device("cuda", 0))


def main() -> None:
    task, *names = sys.argv[1:]
    known = {candidate.name: candidate for candidate in candidates()}
    for name in names:
        try:
            row = {"check": check, "time": time}[task](known[name])
        except Exception as error:  # whatever a compiler or a kernel throws is this candidate's result
            row = {"name": name, "error": f"{type(error).__name__}: {error}"[-2000:]}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
