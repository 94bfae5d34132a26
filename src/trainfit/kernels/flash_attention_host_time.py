"""What FlashAttention costs the host, beside PyTorch's flash: ``python -m trainfit.kernels.flash_attention_host_time``.

A short sequence takes the GPU less time than the host needs to ask for it, so the time until a call returns is all there is.
Prints microseconds a forward and a backward (medians), and with ``--profile`` where ours go. The host's clock only: 50 calls between
two waits, which no sample of the benchmarks' harness is, the GPU's clocks not watched. For work on the launchers; the pages
of the benchmarks quote ``host_s`` of ``trainfit bench flash``.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.flash_attention.op import flash_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
LENGTH, HEADS = 256, 16
WARM_UP, PER_ROUND = 20, 50
"""Calls before the clock runs; calls between two waits for the GPU, few enough that its queue never is full."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of our FlashAttention and of PyTorch's flash.")
    parser.add_argument("--profile", action="store_true", help="also the 15 dearest functions of ours")
    parser.add_argument("--rounds", type=int, default=10)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU, and these kernels run on one")
    for d in (64, 128):
        for name, attention in (("ours", _ours), ("PyTorch's flash", _torch_flash)):
            for direction, call in calls(attention, d, torch.device("cuda")).items():
                print(
                    f"d {d:<4} {name:<16} {direction:<9} {host_us(call, chosen.rounds):7.1f} us", flush=True
                )
    if chosen.profile:
        for direction, call in calls(_ours, 128, torch.device("cuda")).items():
            print(direction)
            _print_profile(call)


def calls(attention: Attention, d: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """A forward that keeps what the backward needs, and the backward alone; heads of ``d``, causal, bf16."""
    q, k, v = (
        torch.randn(1, HEADS, LENGTH, d, dtype=torch.bfloat16, device=device, requires_grad=True)
        for _ in range(3)
    )
    out = attention(q, k, v)
    gradient = torch.randn_like(out)
    return {
        "forward": lambda: attention(q, k, v),
        "backward": lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True),
    }


def host_us(call: Callable[[], Any], rounds: int) -> float:
    """Microseconds until ``call`` returns: the median of ``rounds`` times 50 calls, the GPU idle before each round."""
    for _ in range(WARM_UP):
        call()
    times_s: list[float] = []
    for _ in range(rounds):
        _wait()
        for _ in range(PER_ROUND):
            start = time.perf_counter()
            call()
            times_s.append(time.perf_counter() - start)
    return statistics.median(times_s) * 1e6


def _ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attention(q, k, v, is_causal=True)


def _torch_flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _print_profile(call: Callable[[], Any]) -> None:
    """Of the calling thread and, in the backward, of autograd's where it has Python's profiler; what it adds is in it."""
    profile = cProfile.Profile()
    for _ in range(4):
        _wait()
        profile.enable()
        for _ in range(PER_ROUND):
            call()
        profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(15)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
