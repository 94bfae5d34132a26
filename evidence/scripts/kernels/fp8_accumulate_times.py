"""Time a weight's gradient in fp8 that is added to a sum: product and addition apart, and in one.

    python -m evidence.scripts.kernels.fp8_accumulate_times [--rounds 20]

Prints, for the linear layers of Qwen2.5 0.5B and 7B, the median microseconds of ``torch._scaled_mm`` and
``add_``, and of the product that adds (cuBLASLt with beta 1), by turns on one GPU. Takes under a minute.
"""

import argparse
from collections.abc import Callable
from statistics import median

import torch

from trainfit.kernels.weight_gradient import op

SHAPES = {
    "0.5b qkv": (1152, 896, 32768), "0.5b output": (896, 896, 32768), "0.5b gate-up": (9728, 896, 32768),
    "0.5b down": (896, 4864, 32768), "7b qkv": (4608, 3584, 4096), "7b output": (3584, 3584, 4096),
    "7b gate-up": (37888, 3584, 4096), "7b down": (3584, 18944, 4096),
}  # fmt: skip
"""Outputs, inputs, tokens of a micro-batch."""


def microseconds(run: Callable[[], object]) -> float:
    """Time a run by events; the first is behind work of the GPU, so that the host is not in it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return 1000 * begin.elapsed_time(end)


def times(outputs: int, inputs: int, tokens: int, rounds: int) -> tuple[float, float, float]:
    """Return the medians of product and addition, of the product alone, and of the product that adds."""
    d = torch.randn(outputs, tokens, device="cuda").to(torch.float8_e5m2)
    x = torch.randn(inputs, tokens, device="cuda").to(torch.float8_e4m3fn)
    scale, kept = (
        torch.full((1,), 1e-3, device="cuda"),
        torch.zeros(outputs, inputs, device="cuda").bfloat16(),
    )

    def alone() -> torch.Tensor:
        return torch._scaled_mm(d, x.t(), scale, scale, out_dtype=torch.bfloat16)

    runs = (
        lambda: kept.add_(alone()), alone,
        lambda: torch.ops.trainfit.add_fp8_weight_gradient_(d, scale, x, scale, kept),
    )  # fmt: skip
    for run in runs * 3:
        run()
    samples = [[microseconds(run) for run in runs] for _ in range(rounds)]
    apart, product, fused = (median(column) for column in zip(*samples, strict=True))
    return apart, product, fused


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    op.register_fp8()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {rounds}, microseconds")
    print(f"{'layer':<14}{'outputs x inputs x tokens':>26}{'apart':>9}{'product':>9}{'fused':>9}{'saved':>8}")
    for name, shape in SHAPES.items():
        apart, product, fused = times(*shape, rounds)
        sizes, saved = " x ".join(map(str, shape)), 1 - fused / apart
        print(f"{name:<14}{sizes:>26}{apart:>9.0f}{product:>9.0f}{fused:>9.0f}{saved:>8.1%}")


if __name__ == "__main__":
    main()
