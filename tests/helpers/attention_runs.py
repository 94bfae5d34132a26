"""Inputs of attention, its definition, and the errors of an implementation against fp64."""

import math
from typing import Any

import torch
from torch import Tensor

from evidence.scripts.kernels.error_location import where_wrong

RESULTS = ("out", "dq", "dk", "dv")


def plain(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Compute softmax(QK^T / sqrt d) V with all scores; rows without keys give zeros."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        n, m = scores.shape[-2:]
        seen = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
        scores = scores.masked_fill(seen.logical_not(), -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def inputs(
    b: int, h: int, k: int, n: int, m: int, d: int, dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    torch.manual_seed(n * 1000 + d)
    shapes = ((b, h, n, d), (b, k, m, d), (b, k, m, d), (b, h, n, d))
    return [torch.randn(shape, dtype=torch.float64, device=device).to(dtype) for shape in shapes]


def computed(run: Any, tensors: list[Tensor], is_causal: bool, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of q, k and v, computed in ``dtype``."""
    *leaves, gradient = (x.detach().to(dtype) for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    out = run(*leaves, is_causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def largest_error(run: Any, tensors: list[Tensor], is_causal: bool) -> float:
    wanted = computed(plain, tensors, is_causal, torch.float64)
    found = computed(run, tensors, is_causal, tensors[0].dtype)
    return max((a.double() - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


def wrong_results(
    run: Any, tensors: list[Tensor], is_causal: bool, names: tuple[str, ...] = RESULTS, slack: float = 1e-6
) -> list[str]:
    """Results that err, against fp64, by more than twice the error of ``plain`` in their dtype and slack.

    In fp32 four times: three products of TF32 err up to three times as much as one of fp32.
    """
    dtype = tensors[0].dtype
    times = 4 if dtype == torch.float32 else 2
    exact = computed(plain, tensors, is_causal, torch.float64)
    eager, found = (computed(each, tensors, is_causal, dtype) for each in (plain, run))
    lines = []
    for name, ours, theirs, right in zip(RESULTS, found, eager, exact, strict=True):
        allowed = times * (theirs.double() - right).abs().max().item() + slack
        if name in names and (line := where_wrong(name, ours, right, allowed)):
            worst = (ours.double() - right).abs().max().item()
            lines.append(
                f"{list(tensors[0].shape)} by {list(tensors[1].shape)} {dtype}: off by {worst:.3g}; {line}"
            )
    return lines
