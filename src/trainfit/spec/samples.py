"""What every measured number comes with: where it was made, and the samples of it."""

import statistics

from trainfit.spec.value import Bytes, Value


class Environment(Value):
    """Where a measurement was made."""

    device: str
    """Name of the GPU, or of the CPU."""
    device_bytes: Bytes
    driver: str | None = None
    torch: str
    cuda: str | None = None
    transformers: str | None = None
    python: str
    platform: str
    clocks_mhz: dict[str, int] = {}
    """Sampled while the last timed step ran: ``sm``, ``memory``, and the most each can do."""
    throttled: tuple[str, ...] = ()
    """Why the driver held the clocks below their most while the steps were timed (NVML's names)."""
    variables: dict[str, str] = {}
    """Environment variables that change memory or speed, such as PYTORCH_CUDA_ALLOC_CONF, as they were set."""
    commit: str | None = None


class Spread(Value):
    """Samples of one quantity, in the order taken, and their summary."""

    samples: tuple[float, ...]
    median: float
    low: float
    """10th percentile."""
    high: float
    """90th percentile."""

    @classmethod
    def of(cls, samples: list[float]) -> "Spread":
        """Summarise at least one sample (nearest-rank percentiles)."""
        if not samples:
            raise ValueError("samples is empty: a spread needs at least one sample")
        ordered = sorted(samples)

        def at(share: float) -> float:
            return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]

        return cls(samples=tuple(samples), median=statistics.median(ordered), low=at(0.1), high=at(0.9))
