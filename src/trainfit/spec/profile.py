"""What a profiler's trace, or a Trainer's log, says of a run's speed."""

from typing import Literal

from trainfit.spec.value import Bytes, Count, Flops, Seconds, Share, Value


class KernelKind(Value):
    """Kernels of one kind in the window of a trace."""

    name: str
    seconds: Seconds
    num_kernels: Count


class Stretch(Value):
    """A stretch of the window in which the GPU waits for the host again and again."""

    begin_s: Seconds  # Since the window began
    seconds: Seconds
    step: Count | None  # The profiler's number of the step; None: no steps are marked
    waited_s: Seconds
    num_kernels: Count
    kernel_s: Seconds  # Median duration of a kernel
    op: str  # The host's operation that most of its kernels wait for


class SyncPoint(Value):
    """Calls with which the host waits for the GPU, by what makes them."""

    call: str  # Such as cudaStreamSynchronize
    op: str  # The host's operation around it; empty: none was recorded
    num_calls: Count
    seconds: Seconds


class Utilisation(Value):
    """FLOPs of a step against the GPU's peak, and what MFU is the product of."""

    flops: Flops  # Of one step on one GPU
    flops_are: Literal["the recipe's model FLOPs", "matrix products by their shapes"]
    peak_flops_per_s: float
    dtype: str
    mfu: Share
    products_rate: Share
    """FLOPs over the time of products and attention alone and the peak."""


class TraceFacts(Value):
    """The use of a GPU in the window of a profiler's trace: from the first marked step to the last."""

    kind: Literal["trace"] = "trace"
    file: str
    gpu: str  # As its driver names it; empty: not in the file
    device: Count
    num_events: Count
    num_bytes: Bytes  # Of the file, decompressed
    num_steps: Count  # 0: none are marked; the window is all of the trace
    window_s: Seconds
    step_s: Seconds | None  # Median
    num_kernels: Count
    num_unqueued: Count  # Kernels that begin within 20 us of their launch: the host sets their pace
    kernel_s: Seconds  # Median duration of a kernel
    busy_s: Seconds  # Some kernel, copy or fill runs, as nvidia-smi counts
    waits_for_host_s: Seconds  # Idle, and the next kernel begins as soon as it is launched
    between_kernels_s: Seconds  # Idle for a few microseconds between queued kernels
    other_idle_s: Seconds
    communication_s: Seconds
    exposed_communication_s: Seconds  # Nothing else runs
    copies_s: Seconds
    exposed_copies_s: Seconds
    kinds: tuple[KernelKind, ...]  # The longest first; their seconds add up streams that overlap
    stretches: tuple[Stretch, ...]
    syncs: tuple[SyncPoint, ...]
    utilisation: Utilisation | None = None  # None: no FLOPs or no peak known

    @property
    def busy(self) -> float:
        """Share of the window in which the GPU is busy."""
        return self.busy_s / self.window_s if self.window_s else 0.0

    def seconds_of(self, *names: str) -> float:
        """Return the seconds of kinds of kernels."""
        return sum(one.seconds for one in self.kinds if one.name in names)

    @property
    def products(self) -> float:
        """Share of the kernels' time in matrix products, convolutions and attention."""
        whole = sum(one.seconds for one in self.kinds)
        return self.seconds_of(*PRODUCTS) / whole if whole else 0.0


PRODUCTS = ("matrix products", "attention", "convolutions")


class TrainerRun(Value):
    """A run of the Hugging Face Trainer, as its log or its state says."""

    kind: Literal["trainer"] = "trainer"
    file: str
    num_steps: Count | None = None
    num_logs: Count
    first_loss: float | None = None
    last_loss: float | None = None
    runtime_s: Seconds | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    tokens: Count | None = None
    total_flos: Flops | None = None  # By 6 N D, the embedding not counted
    step_s: Seconds | None = None
    mfu: Share | None = None  # Of the recipe's model FLOPs
    mfu_by_total_flos: Share | None = None
    peak_flops_per_s: float | None = None
    num_gpus: Count = 1
