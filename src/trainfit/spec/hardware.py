"""Gpu and Link: what a recipe runs on. Peaks are dense (no structured sparsity)."""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from trainfit.spec.value import Bytes, PositiveInt, Seconds, Value, disagreement

PeakDtype = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4"]
PositiveFloat = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
LEAST_FOR_TRITON = (8, 0)
"""Compute capability of the oldest NVIDIA GPUs that Triton supports (its README, Compatibility)."""


class Source(Value):
    """Origin of a number: a public document's address and the day it was read, or a record."""

    url: str
    accessed: str
    note: str = ""


class Link(Value):
    """A connection between GPUs, or GPU and host; ``bytes_per_s``: one direction, one GPU, whole width."""

    name: str
    kind: Literal["nvlink", "infinity-fabric", "pcie", "ici", "ethernet", "infiniband"]
    bytes_per_s: PositiveFloat
    latency_s: PositiveFloat
    axes: PositiveInt = 1  # Of the torus that it builds; each has an equal share of bytes_per_s
    source: Source


class StepTimeRange(Value):
    """Measured step times of a GPU over the expected ones."""

    low: PositiveFloat
    high: PositiveFloat
    basis: str
    """Steps that the range covers."""


class Sustained(Value):
    """Shares of the data sheet that a GPU sustains in a training step.

    A GPU without a calibration takes its reference's times by the ratio of what the two sustain.
    """

    products: Share  # Of the dense 16-bit peak: large aligned products
    mma: Share  # Of the same: kernels with Ampere's instructions, as PyTorch's flash attention
    memory: Share  # Of the bandwidth: operations that move bytes
    steps: StepTimeRange | None = None
    """Published steps over those predicted with these shares; None: none were compared."""
    source: Source


class DeviceMemory(Value):
    """Device memory outside the caching allocator, as measured on a GPU."""

    context_bytes: Bytes  # CUDA context with the kernels of PyTorch and cuBLAS
    cudnn_bytes: Bytes  # More, once cuDNN's attention has run
    copy_bytes: Bytes  # More, once pinned host memory is copied on streams of its own
    page_table_ratio: PositiveInt  # Bytes of pinned host memory to a byte of the GPU's page tables
    nccl_bytes: Bytes  # Kernels of NCCL
    communicator_bytes: Bytes  # Channels and buffers of each communicator that is used
    exchange_bytes: Bytes  # More for each communicator of an all-to-all
    source: Source


class Transfers(Value):
    """Shares of the links' rates that copies and collectives reach, as measured on a GPU."""

    host_copies: Share  # Copies between the GPU and pinned host memory
    collectives: dict[str, Share]
    """Inside a host, with tensors of a GB, by the ledger's name of the collective."""
    between_hosts: Share  # Any collective, of the network's rate
    start_s: Seconds  # Of a collective, in addition to its bytes and the link's latency
    source: Source


class Cuda(NamedTuple):
    """Columns that every row of an NVIDIA GPU has."""

    compute_capability: tuple[int, int]
    num_sms: int
    threads_per_sm: int
    shared_memory_per_block_bytes: int
    l2_cache_bytes: int


class Gpu(Value):
    """One accelerator as its maker describes it: a row of the catalog."""

    name: str  # The catalog's key: lower case, such as ``h100-sxm``
    title: str
    device_names: tuple[str, ...] = ()  # The driver's names of it (``torch.cuda.get_device_name``)
    aliases: tuple[str, ...] = ()
    """Short names that stand for it, also where they would fit other rows (``H100``)."""
    vendor: Literal["nvidia", "amd", "google", "intel", "host"]
    architecture: str
    compute_capability: tuple[int, int] | None = None
    """CUDA compute capability; None elsewhere, as are the next four, but for AMD's ``num_sms``."""
    gfx: str | None = None  # AMD's name of the architecture, such as ``gfx942``
    num_sms: PositiveInt | None = None  # Streaming multiprocessors; of AMD's, compute units
    threads_per_sm: PositiveInt | None = None
    shared_memory_per_block_bytes: PositiveInt | None = None  # The most that one block may opt in to
    l2_cache_bytes: Annotated[int, Field(ge=1)] | None = None
    cached_bytes: Annotated[int, Field(ge=1)] | None = None
    """Bytes of a timed operation that stay in the L2 cache between its runs; None: as many as it holds."""
    memory_bytes: Bytes  # Memory on the data sheet
    usable_bytes: Bytes  # Total of ``torch.cuda.mem_get_info``, or the data sheet's
    memory_bytes_per_s: PositiveFloat | None  # None: not known (this machine's CPU)
    peak_flops_per_s: dict[PeakDtype, PositiveFloat]  # Dense peak by dtype of the inputs, FLOP/s
    link: str  # Name of the Link to its neighbours in one host
    host_link: str  # Name of the Link to its host's memory
    network: str = "ib-ndr"  # Name of the Link between hosts, one port for each GPU
    gpus_per_host: PositiveInt = 8
    step_time_range: StepTimeRange | None = None  # None: no step was measured on it
    highest_step_ratio: PositiveFloat = 3.0
    """Multiple of the expected step time that bounds it where no step was measured."""
    least_headroom: Share = 0.01  # A prediction that fits with less of the device free is warned of
    reference: str = "h200"  # Measured GPU, whose operations and columns stand for those that this row lacks
    sustained: Sustained | None = None  # None: the reference's, as the next two
    device_memory: DeviceMemory | None = None
    transfers: Transfers | None = None
    operations_of: str | None = None  # GPU whose calibration is taken; None: its own, else the reference's
    attention_rates_of: str = "h200"  # Its measured rates are taken, as shares of the dense peak
    price_per_hour: PositiveFloat | None = None  # US dollars, on demand, one accelerator
    price_source: Source | None = None
    source: Source

    @model_validator(mode="after")
    def _has_every_column_of_its_vendor(self) -> "Gpu":
        missing = [name for name in Cuda._fields if getattr(self, name) is None]
        if self.vendor == "nvidia" and missing:
            raise disagreement("missing in a row of an NVIDIA GPU", "add the column", field=missing[0])
        margins = ("highest_step_ratio", "least_headroom")
        unset = [name for name in margins if name not in self.model_fields_set]
        if self.gfx is not None and unset:
            # The defaults hold where kernels are those that were measured.
            raise disagreement("missing in a row of an AMD GPU", "add the column", field=unset[0])
        return self

    @property
    def basis(self) -> Literal["measured", "modelled", "accounted"]:
        """What a prediction rests on: measured steps, the virtual GPU's rules, or none (``mfu`` only)."""
        if self.step_time_range is not None:
            return "measured"
        return "accounted" if self.cuda is None and self.gfx is None else "modelled"

    @property
    def cuda(self) -> Cuda | None:
        """The columns of an NVIDIA GPU; None elsewhere."""
        values = [getattr(self, name) for name in Cuda._fields]
        return None if None in values else Cuda(*values)
