"""Time the cross-entropy kernel with other blocks and warps, on the chunks of Qwen2.5's fused loss.

    python -m evidence.scripts.kernels.cross_entropy_tune [--out FILE]

Bandwidth counts 6 bytes a logit: read twice, written once. Fewer rows in flight leave more of a row in the
cache until its second pass. Takes some 15 seconds on a GPU.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trainfit.kernels.cross_entropy.fused import logits_buffer, triton_cross_entropy
from trainfit.kernels.cross_entropy.terms import Terms

ROWS, VOCABULARY = 1664, 151936
CONFIGURATIONS = [
    (block, warps) for block in (1024, 2048, 4096, 8192, 16384) for warps in (4, 8, 16, 32)
    if 4 <= block // (32 * warps) <= 32
]  # fmt: skip
"""Elements of a row that a program reads at a time, 4 to 32 a thread, and its warps."""
RUNS = 20


def seconds(block: int, num_warps: int, logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the median time of a call; the logits are overwritten by their gradient."""
    factor = torch.ones((), device=logits.device)

    def run() -> None:
        triton_cross_entropy(
            logits, targets, factor, 1.0, 0.0, Terms(), True, block=block, num_warps=num_warps
        )

    times = list[float]()
    for number in range(RUNS + 3):
        logits.normal_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def rows() -> list[dict[str, Any]]:
    """Return a row for each configuration, the fastest first."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    logits = logits_buffer(torch.empty(0, device=device, dtype=dtype), ROWS, VOCABULARY, dtype)
    targets = torch.randint(VOCABULARY, (ROWS,), device=device)
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": ROWS, "v": VOCABULARY}
    found = list[dict[str, Any]]()
    for block, num_warps in CONFIGURATIONS:
        taken_s = seconds(block, num_warps, logits, targets)
        moved = 6 * ROWS * VOCABULARY / taken_s
        found.append(about | {"block": block, "warps": num_warps, "s": taken_s, "bytes_per_s": moved})
    return sorted(found, key=lambda row: row["s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = rows()
    for row in found:
        rate = f"{row['bytes_per_s'] / 1e9:,.0f} GB/s"
        print(f"block {row['block']:6} warps {row['warps']:3} {1e6 * row['s']:8.1f} us {rate}")
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")


if __name__ == "__main__":
    main()
