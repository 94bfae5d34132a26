"""Speed of this machine, for bounds in seconds."""

import functools
import time

REFERENCE_S = 0.08
"""CPU time of the workload on an idle core of the machine on which bounds were chosen."""


@functools.cache
def slowness() -> float:
    """Return how many times slower than the reference this machine is, at least 1; timed once per process."""
    import torch

    begin_s = time.process_time()
    values = {}
    for number in range(300_000):
        values[number % 1000] = values.get(number % 997, 0) + number
    matrix = torch.ones(256, 256)
    for _ in range(200):
        matrix = (matrix @ matrix).clamp(max=1.0) + 0.1
    return max(1.0, (time.process_time() - begin_s) / REFERENCE_S)
