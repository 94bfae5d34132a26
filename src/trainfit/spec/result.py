"""Cost of a step, predicted (Estimate) or measured (Measurement), and the Record that keeps it.

Sizes in bytes, times in seconds, FLOPs of one optimizer step on one GPU unless a name says otherwise.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field

from trainfit.spec.bench import BenchResult, Environment, Spread
from trainfit.spec.micro_batches import Added, Derived, Same
from trainfit.spec.value import Bytes, Count, Flops, Seconds, Share, Value

PHASES: tuple[str, ...] = ("forward", "backward", "optimizer")


class MemoryBreakdown(Value):
    """Bytes alive at one moment, by what they hold. The parts sum to the total."""

    weights: Bytes = 0  # Parameters and buffers
    gradients: Bytes = 0
    optimizer: Bytes = 0  # Its state
    activations: Bytes = 0  # Saved by the forward for the backward, the batch included
    temporary: Bytes = 0  # Everything else alive
    communication: Bytes = 0  # Buffers of collectives
    workspace: Bytes = 0  # Scratch that libraries keep (cuBLAS, cuDNN)
    kv_cache: Bytes = 0  # Keys and values of sequences that are generated

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in CATEGORIES)


CATEGORIES: tuple[str, ...] = tuple(MemoryBreakdown.model_fields)


class PhasePeaks(Value):
    """Highest allocated bytes while each phase of one optimizer step runs."""

    forward: Bytes
    backward: Bytes
    optimizer: Bytes

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward, self.optimizer)


class Phases(Value):
    """Allocated bytes: after init, then each phase's peak in the first step and in any later one (steady)."""

    after_init: Bytes
    first: PhasePeaks
    steady: PhasePeaks

    @property
    def peak(self) -> int:
        return max(self.after_init, self.first.peak, self.steady.peak)


class StepTime(Value):
    """Parts of one step's time, in seconds; those that are not hidden sum to ``total``."""

    matmul_s: Added[Seconds] = 0.0
    memory_s: Added[Seconds] = 0.0
    communication_s: Added[Seconds] = 0.0
    """The computation waits for collectives and copies to and from the host, and is slower meanwhile."""
    host_s: Added[Seconds] = 0.0  # The GPU waits for the host
    hidden_communication_s: Added[Seconds] = 0.0  # Collectives while the GPU computes
    bubble_s: Added[Seconds] = 0.0  # Waiting for other stages of a pipeline
    attention_s: Added[Seconds] = 0.0  # Part of matmul_s
    optimizer_s: Added[Seconds] = 0.0  # Part of memory_s: all of the update
    issue_s: Added[Seconds] = 0.0
    """The host's own work, most of it while the GPU computes."""

    @property
    def total(self) -> float:
        return self.matmul_s + self.memory_s + self.communication_s + self.host_s + self.bubble_s

    @property
    def busy(self) -> float:
        """Share of the step in which the GPU runs kernels, as nvidia-smi prints it."""
        return (self.matmul_s + self.memory_s) / self.total if self.total else 0.0

    @property
    def memory_bound(self) -> float:
        """Share of the GPU's busy time in operations without matrix products."""
        busy_s = self.matmul_s + self.memory_s
        return self.memory_s / busy_s if busy_s else 0.0


class Traffic(Value):
    """Collectives of one kind in a step of one rank."""

    kind: Same[str]
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast``, ``all_to_all``, or ``send`` between
    two stages of a pipeline."""
    num_ranks: Same[Count]
    between_hosts: Same[bool]
    calls: Added[Count]
    bytes_sent: Added[Bytes]
    """Through the GPU's link, by a ring; an all-to-all's that leaves the host is counted apart."""


class PipelineGpu(Value):
    """The stages of one position of a pipeline, on one GPU."""

    blocks: tuple[tuple[Count, Count], ...]
    """First and last block of each stage, counted from 1."""
    params: Count
    in_flight: Count
    """The most forwards of a stage that wait for their backwards at once."""
    peak_allocated_bytes: Bytes
    peak_device_bytes: Bytes
    forward_s: Seconds | None
    """Of one micro-batch through all of the GPU's stages."""
    backward_s: Seconds | None
    idle_s: Seconds | None
    """In a step, waiting for other stages."""


class Cost(Value):
    """US dollars."""

    price_per_gpu_hour: float
    num_gpus: Count
    per_hour: float
    per_million_tokens: float | None  # None: of traced code whose tokens are not known
    per_million_samples: float | None = None  # Of traced code


class Interval(Value):
    """A stated bound: the true value is expected inside."""

    low: float
    high: float
    basis: str  # Why it is believed: a record, a theorem or a stated assumption


class PeakHolder(Value):
    """Bytes that one operation in one module of traced code holds at the peak."""

    num_bytes: Bytes
    category: str
    module: str
    operation: str


class OtherPhase(Value):
    """An evaluation, a generation or the writing of a checkpoint in traced code, outside its training steps.

    Of several, time, FLOPs and counts are those of the one with the most operations.
    """

    name: Literal["evaluation", "generation", "checkpoint", "scoring"]
    num_times: Count  # Found while the steps were traced
    after_steps: tuple[Count, ...]  # The number of complete optimizer steps before each
    num_forwards: Count
    peak_allocated_bytes: Bytes  # The highest of all of them; part of the verdict
    seconds: Seconds | None
    """None: the GPU's speed is not known. Of a checkpoint, copies to the host at the link's rate, and no
    disk."""
    flops: Flops
    saved_bytes: Bytes = 0


class StepInputs(Value):
    """The inputs of a training step of traced code, on one GPU and of all together."""

    tokens: Count  # Integers that the module's first embedding looks up; 0: none
    samples: Count  # Length of the first dimension of its first input; 0: not known
    data_ranks: Count  # GPUs with inputs of their own
    samples_per_s: float | None = None  # Of all GPUs


class TracedCode(Value):
    """The user's own training code that an estimate is of, in place of a recipe."""

    name: str  # Qualified name of the callable, or the script
    gpu: str
    num_steps: Count  # Optimizer steps that were traced
    num_launches: Count = 0  # Of the steady step, by the host
    num_recomputed_blocks: Count = 0  # In its backward
    num_python_calls: Count = 0  # Python functions that the script calls in the steady step
    holders: tuple[PeakHolder, ...]  # The largest holders of memory at the peak, in descending order
    inputs: StepInputs | None = None  # None: no module was called in the step
    other_phases: tuple[OtherPhase, ...] = ()
    """Phases outside the training steps; no figure of the step includes them."""
    scoring: OtherPhase | None = None
    """Forwards without gradients in a step, which its figures include: a policy's log-probabilities, a
    teacher."""


class Peak(Value):
    """Sizes of a peak, in bytes."""

    allocated: Bytes
    reserved: Bytes
    device: Bytes


class TwoPeaks(Value):
    """The two peaks of which a run has one or the other, as its threads or timings fall."""

    expected: Peak
    """The lower one, which the estimate's own fields are of."""
    possible: Peak
    """The higher one, which decides whether the run fits."""
    possible_phases: Phases
    reason: str


WhichPeak = Literal["expected", "possible"]
HELD_BUCKETS = (
    "NCCL may hold DDP's first buckets into the second backward, depending on when its watchdog thread looks"
)
PADDED_COPIES = (
    "Inductor times a matrix product with and without padded operands in each run, and here the two are near"
)
"""Reasons of two peaks (docs/internals/data-parallel.md, virtual-gpu.md)."""


class Compilation(Value):
    """Work of torch.compile before the first step, with an empty cache."""

    seconds: Seconds
    bounds: Interval  # Of ``seconds``
    num_graphs: Count
    num_kernels: Count
    """Kernels and library calls of the graphs' programs, forward and backward."""
    eager_step_s: Seconds | None = None
    """A step of the same recipe without compilation; None: not predicted, or it cannot work without."""
    eager_fits: bool | None = None
    pays_from_steps: Count | None = None
    """Steps from which a compiled run is the shorter one; None: it never is, or that is not known."""

    def pays_between(self, step_s: float) -> tuple[int, int] | None:
        """Return ``pays_from_steps`` at both bounds of ``seconds``; None where that is None."""
        if self.pays_from_steps is None or self.eager_step_s is None:
            return None
        gain_s = self.eager_step_s - step_s
        return int(self.bounds.low / gain_s) + 1, int(self.bounds.high / gain_s) + 1


class LoopMemory(Value):
    """Memory of a phase of a policy's loop, the highest of its first and its later loops."""

    phase: str
    """``rollout`` (gather, prefill, capture, decode), ``scoring`` (with the reference's) or ``update``."""
    peak_allocated_bytes: Bytes
    peak_reserved_bytes: Bytes
    peak_device_bytes: Bytes | None = None  # None: of a measurement
    breakdown: MemoryBreakdown | None = None  # At the phase's peak; None: of a measurement


class LoopPart(Value):
    """Time of one part of a policy's loop; FLOPs of one GPU, tokens of all."""

    name: str
    """``gather``, ``prefill``, ``capture``, ``decode``, ``scoring``, ``reference`` or ``update``."""
    calls: Count  # In a loop
    seconds: Seconds  # Of all calls
    tokens: Count  # Read, sampled, scored or trained on; padding included
    model_flops: Flops = 0
    hardware_flops: Flops = 0
    mfu: Share | None = None
    hfu: Share | None = None
    busy: Share | None = None
    """Share of the time in which the GPU runs kernels, as nvidia-smi prints it."""
    memory_access: Share | None = None
    """Predicted: bytes over the data sheet's bandwidth. Measured: the share of time in which device memory
    was read or written, as nvidia-smi prints it."""

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None


class LoopTime(Value):
    """A policy's loop, from the weights of one rollout to those of the next."""

    lengths: str  # Of the completions, in words
    mean_new: Annotated[float, Field(ge=0)]  # Tokens of a completion on average
    seconds: Seconds
    new_tokens_per_s: float | None  # Of all GPUs and the whole loop
    mfu: Share | None = None
    hfu: Share | None = None
    busy: Share | None = None
    memory_access: Share | None = None
    parts: tuple[LoopPart, ...]

    def share(self, part: LoopPart) -> float:
        """Return a part's share of the loop's time."""
        return part.seconds / self.seconds if self.seconds else 0.0

    def by_phase(self) -> dict[str, float]:
        """Return the seconds of rollout, scoring and update."""
        found: dict[str, float] = {"rollout": 0.0, "scoring": 0.0, "update": 0.0}
        for one in self.parts:
            phase = "scoring" if one.name == "reference" else one.name
            found[phase if phase in found else "rollout"] += one.seconds
        return found


class Lever(Value):
    """What moving something off the GPU between phases would give."""

    moved: str
    during: str  # Phases
    num_bytes: Bytes  # That the GPU does not hold meanwhile
    lower_bytes: Bytes  # By so much the loop's highest peak is lower
    seconds: Seconds  # Of copies in each loop, at the rate of the host's link


class Loop(Value):
    """A policy's loop: rollout, scoring and update."""

    completions: Count  # Of a loop, on all GPUs
    slots: Count  # Sequences that a GPU generates at a time
    cache_bytes: Bytes  # Keys and values, allocated once
    memory: tuple[LoopMemory, ...]
    longest: LoopTime | None = None
    """Every completion at its longest; None: the GPU's speed is not known, or nothing was timed."""
    expected: LoopTime | None = None
    """Completions of an expected mean length, or of those that a run recorded. Measured: of the mean that a
    prediction assumes, in rollout, scoring and update."""
    recorded: LoopTime | None = None
    """What that run measured, without its environment's time; its parts are rollout, scoring and update."""
    levers: tuple[Lever, ...] = ()
    whole_logits_bytes: Bytes = 0
    """Logits of an update's micro-batch in fp32, which no phase holds."""

    @property
    def reserves(self) -> bool:
        """Whether an allocator's reserved bytes were read: not on a CPU, whose are those in use."""
        return any(one.peak_reserved_bytes != one.peak_allocated_bytes for one in self.memory)


class Estimate(Value):
    """The prediction for one recipe, or for the user's own training code (``trainfit.trace``)."""

    recipe_id: Derived[str | None]  # None: of the user's own code, which ``code`` describes
    phases: Same[Phases]
    breakdown: Same[MemoryBreakdown]  # At the moment of the peak
    peak_phase: Same[str]  # Which phase holds the peak, such as ``steady.backward``
    peak_allocated_bytes: Same[Bytes]
    peak_reserved_bytes: Same[Bytes]
    peak_device_bytes: Same[Bytes]
    """As nvidia-smi shows it: reserved, the CUDA context and the libraries' own memory."""
    two_peaks: Same[TwoPeaks | None] = None
    """Of DDP, and of some compiled models. The peaks, phases and breakdown above are of the expected one;
    ``fits`` and the headroom of the possible one."""
    device_bytes: Same[Bytes]  # Usable by a process
    host_bytes: Same[Bytes] = 0  # Pinned host memory of what offload keeps there
    fits: Same[bool]
    params: Same[Count]
    trainable_params: Same[Count]
    active_params: Same[Count | None] = None
    """Parameters that one token meets: of a mixture, without the experts not chosen. None: not counted."""
    model_flops: Added[Flops]
    """FLOPs the mathematics needs: no recomputation; attention as ``flops_convention`` says."""
    hardware_flops: Added[Flops]  # FLOPs the device executes, recomputation included
    flops_convention: Same[str]
    step_s: Added[Seconds | None]
    time: Added[StepTime | None]
    tokens_per_s: Derived[float | None]
    mfu: Derived[Share | None]
    hfu: Derived[Share | None]
    cost: Derived[Cost | None]
    num_gpus: Same[Count] = 1
    """On several, memory, FLOPs and utilisation are of one GPU, and tokens and cost of all."""
    compilation: Same[Compilation | None] = None
    """None: nothing is compiled, or for a CPU, or it was predicted before estimates had it."""
    traffic: Added[tuple[Traffic, ...]] = ()
    pipeline: Same[tuple[PipelineGpu, ...]] = ()
    """By position in the pipeline; memory and time parts above are of the one with the highest peak."""
    bubble: Same[Share | None] = None
    """Share of the forwards' and backwards' time that GPUs wait for other stages, on average; None: no
    pipeline."""
    assumptions: Derived[tuple[str, ...]] = ()
    ops_without_flops: Same[tuple[str, ...]] = ()
    """Operations that compute but have no FLOP rule, by name; they count as 0."""
    bounds: Derived[dict[str, Interval]] = {}
    warnings: Same[tuple[str, ...]] = ()
    """Conditions under which the numbers may not hold: little headroom, a dtype that the GPU emulates."""
    versions: Same[dict[str, str]] = {}
    """Of torch and the libraries that the step uses, by name. Empty: made before estimates carried them."""
    gpu: Same[str | None] = None  # As the catalog calls it; None: made before estimates carried it
    code: Same[TracedCode | None] = None  # None: of a recipe
    loop: Derived[Loop | None] = None
    """Of a policy: memory above is the whole loop's, FLOPs, time and utilisation are those of an update."""

    @property
    def highest(self) -> Peak:
        """The highest peak that is possible: a limit must hold for it."""
        if self.two_peaks is not None:
            return self.two_peaks.possible
        return Peak(
            allocated=self.peak_allocated_bytes,
            reserved=self.peak_reserved_bytes,
            device=self.peak_device_bytes,
        )

    @property
    def headroom_bytes(self) -> int:
        """Free bytes left on the device at the highest peak; negative when it does not fit."""
        return self.device_bytes - self.highest.device

    def met(self, **measured: int | None) -> WhichPeak | None:
        """Return which of the two peaks measured bytes are nearer to; None: there is one peak, or no bytes.

        Args:
            measured: bytes by the fields of ``Peak``.
        """
        known = {name: size for name, size in measured.items() if size}
        if self.two_peaks is None or not known:
            return None
        peaks: dict[WhichPeak, Peak] = {
            "expected": self.two_peaks.expected,
            "possible": self.two_peaks.possible,
        }
        off = {
            which: sum(abs(getattr(peak, name) - size) / size for name, size in known.items())
            for which, peak in peaks.items()
        }
        return "possible" if off["possible"] < off["expected"] else "expected"

    def with_peak(self, which: WhichPeak | None) -> Self:
        """Return the estimate with sizes and phases of one of its two peaks; None: as it is.

        ``breakdown`` stays that of the expected peak.
        """
        if self.two_peaks is None or which != "possible":
            return self
        sizes = {f"peak_{name}_bytes": size for name, size in self.two_peaks.possible}
        return self.model_copy(update={**sizes, "phases": self.two_peaks.possible_phases})


class Run(Value):
    """Time and cost of a run over ``tokens`` tokens at a step's speed, without interruptions."""

    tokens: float
    step_tokens: Count  # Of all GPUs
    run_s: Seconds
    gpu_hours: float
    price_per_gpu_hour: float | None = None  # US dollars; None: not known
    dollars: float | None = None
    bounds: Interval | None = None  # Of ``run_s``, those of the step


class OnGpu(Value):
    """The prediction of a recipe on one of several kinds or counts of GPUs, and a run's time and cost."""

    gpu: str
    count: Count = 1
    estimate: Estimate | None = None
    run: Run | None = None  # None: no tokens given, or no speed known
    refused: str = ""  # Why there is no estimate


class RankMeasurement(Value):
    """Memory and time of one of several ranks."""

    phases: Phases | None = None
    peak_allocated_bytes: Bytes | None = None
    peak_reserved_bytes: Bytes | None = None
    peak_device_bytes: Bytes | None = None
    step_s: Seconds | None = None


class Measurement(Value):
    """One recipe measured on a real device. Out of memory is a result: ``status`` and the peak reached.

    On several GPUs memory is of the rank with the highest peak, time of the slowest rank, FLOPs and
    utilisation of one GPU, tokens of all, and losses are the ranks' mean.
    """

    recipe_id: str
    status: Literal["done", "out-of-memory", "timeout", "crashed"]
    message: str = ""
    phases: Phases | None = None
    breakdown: MemoryBreakdown | None = None
    """Storages alive at a step's peak, where they can be tracked, else None."""
    peak_allocated_bytes: Bytes | None = None
    peak_reserved_bytes: Bytes | None = None
    peak_device_bytes: Bytes | None = None
    device_bytes: Bytes = 0
    params: Count = 0
    trainable_params: Count = 0
    model_flops: Flops | None = None
    hardware_flops: Flops | None = None
    step_s: Annotated[float, Field(ge=1e-10)] | None = None
    """Median of the steady steps; None also where the driver throttled the GPU, as ``message`` says."""
    step_times: Spread | None = None
    first_step_s: Seconds | None = None
    """With what is compiled, tuned and loaded in it; None: of several ranks, or of an older record."""
    tokens_per_s: float | None = None
    mfu: Share | None = None
    hfu: Share | None = None
    busy: Share | None = None
    """Share of the timed steps in which a kernel ran, as nvidia-smi prints it; None: not known, or they took
    less than a second."""
    memory_access: Share | None = None
    """Share of them in which device memory was read or written, as nvidia-smi prints it."""
    losses: tuple[float, ...] = ()
    loop: Loop | None = None
    """Of a policy: memory above is the whole loop's, time and utilisation are those of an update."""
    environment: Environment
    ranks: tuple[RankMeasurement, ...] = ()
    """By rank; empty: one GPU."""


class Outcome(Value):
    """Outcome of one part of a sweep's trial (docs/guide/sweep.md)."""

    status: Literal["done", "refused", "out-of-memory", "timeout", "killed", "crashed", "diverged", "lost"]
    """refused: the recipe cannot work; killed: a signal from outside; lost: its worker or node is gone."""
    message: str = ""
    seconds: Seconds = 0.0  # Of the whole part, its process's start included
    request_id: str
    """Sixteen hex digits of a hash of the request; a part with a result does not run again."""


class Record(Value):
    """One line of evidence: the recipe, the result and the version of the code."""

    kind: Literal["predict", "measure", "train", "bench"]
    created_at: str  # ISO 8601, UTC
    version: str
    commit: str | None
    recipe: dict[str, Any]  # Empty for a benchmark, which is of no recipe
    recipe_id: str
    previous_id: str | None = None
    """The id under which it was written, if recipes' ids were made otherwise then (spec/provenance.py)."""
    estimate: Estimate | None = None
    measurement: Measurement | None = None
    train: dict[str, Any] | None = None
    """Summary of a training run: steps, losses, evaluation perplexity, checkpoints."""
    tags: tuple[str, ...] = ()
    outcome: Outcome | None = None
    """Only of a sweep's trials; a failed one leaves a record too."""
    bench: BenchResult | None = None
    planned: dict[str, Any] | None = None
    """Only of a sweep's prediction: the recipe with its open fields planned, which the estimate is of."""
