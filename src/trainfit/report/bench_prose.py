"""What each experiment's page is made of beside its records: the question, the claims, and how its rows are told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainfit.report import bench_claims, bench_said, bench_said_attention, bench_said_device
from trainfit.report.bench_claims import Claim
from trainfit.report.bench_rows import PRECISIONS, SIZES, Order
from trainfit.report.bench_step_tables import Parts, of_memory, of_steps, of_streams
from trainfit.report.bench_table import Grid
from trainfit.report.flash_goals import goals
from trainfit.spec.bench import BenchRow

TIMED = (
    "Spread: from the 10th to the 90th percentile, over the median. Unsteady: the time cap came before the median was known as well "
    "as the experiment asks."
)


@dataclass(frozen=True)
class Story:
    """A page's words. ``pivot``: the part of a point whose values become columns of the page's tables; ``shows``: the number in them.

    ``besides``: other numbers, each with a table of its own. ``apart``: the part of a point whose values have tables of their own.
    ``beside_pass``: the pass whose rows the tables of ``besides`` have; a number that no such row has is shown of those that have it.
    ``said``: sentences made of a run's rows. ``first``: a table before all others. ``order``: the rows' order; without it the
    experiment's own. ``tables``: makes the tables, where a pivot alone does not; ``pivot`` is then what stands side by side in them. ``timed``:
    what the tables' words for times mean.
    """

    title: str
    about: str
    claims: tuple[Claim, ...] = ()
    pivot: str = ""
    shows: str = ""
    besides: tuple[str, ...] = ()
    apart: str = ""
    said: Callable[[Sequence[BenchRow]], list[str]] = lambda rows: []
    beside_pass: str = "both"
    first: Callable[[Sequence[BenchRow]], Grid | None] = lambda rows: None
    order: Order = field(default_factory=dict)
    tables: Callable[[Sequence[BenchRow]], Parts] | None = None
    timed: str = TIMED


def stories() -> dict[str, Story]:
    """Every experiment's words, by name."""
    return {**_of_attention(), **_of_numbers(), **_of_the_device(), **_of_steps()}


def _of_attention() -> dict[str, Story]:
    attention, flash = bench_said_attention.of_attention, bench_said_attention.of_flash
    by_shape: Order = {"heads": (16, 1), "dtype": ("bf16", "fp32"), "head": (256, 128, 64, 32, 16), "seq": ()}
    return {
        "attention": Story(
            "Attention: time and memory", ATTENTION, bench_claims.of_attention(), "body", "median_s",
            ("before_backward_bytes", "host_s"), said=attention, order={**by_shape, "heads": (1, 16)},
        ),
        "flash": Story(
            "FlashAttention against PyTorch", FLASH, bench_claims.FLASH, "body", "tflops_per_s", ("host_s",), apart="heads",
            said=flash, first=goals, order=by_shape,
        ),
    }  # fmt: skip


def _of_numbers() -> dict[str, Story]:
    said = bench_said_device
    return {
        "accumulation": Story(
            "Adding many small floats", ACCUMULATION, bench_claims.ACCUMULATION, said=said.of_accumulation
        ),
        "autocast": Story(
            "Which dtype autocast gives", AUTOCAST, bench_claims.AUTOCAST, said=said.of_autocast
        ),
    }


def _of_the_device() -> dict[str, Story]:
    said = bench_said_device
    return {
        "dataloader": Story("Loading data while the device computes", DATALOADER, said=said.of_dataloader),
        "fusion": Story("One elementwise chain, four ways", FUSION, said=said.of_fusion),
        "gpu": Story("What this GPU is", GPU, said=said.of_gpu),
        "streams": Story(
            "When a second stream helps",
            STREAMS,
            bench_claims.STREAMS,
            "streams",
            said=said.of_streams,
            tables=of_streams,
        ),
    }


def _of_steps() -> dict[str, Story]:
    by_model: Order = {"model": SIZES, "precision": PRECISIONS, "context": ()}
    return {
        "kernels": Story(
            "Where a training step's time goes", KERNELS, bench_claims.KERNELS, said=bench_said.of_kernels, order=by_model
        ),
        "memory": Story(
            "Memory through a step", MEMORY, bench_claims.MEMORY, "source", said=bench_said.of_memory, tables=of_memory,
            order={"attention": ("eager", "sdpa"), "context": (), "precision": PRECISIONS},
        ),
        "transformer": Story(
            "A training step of five sizes", TRANSFORMER, bench_claims.TRANSFORMER, "compile", said=bench_said.of_transformer, tables=of_steps,
            timed="",  # Its tables say it themselves.
            order={"model": SIZES, "precision": PRECISIONS, "compile": ("false", "block", "model")},
        ),
    }  # fmt: skip


ACCUMULATION = """\
1000 times 0.01 is added up in four ways, and many floats of magnitudes 1e-4 to 1e4 in five orders. The error is relative to the exactly
rounded sum. The five orders are plain Python loops over fp32 scalars: their times compare with each other and with nothing else."""
AUTOCAST = """\
Each entry is found by running it under `torch.autocast`: the output's dtype of fp32 inputs, and of inputs that are low already. The
components are those of the course's toy model (linear, ReLU, LayerNorm, linear, cross-entropy). The CPU's lists are not CUDA's:
a CPU leaves LayerNorm and softmax in their input's dtype, CUDA runs them in fp32."""
ATTENTION = """\
Batch 8, one head, unmasked: softmax(Q K^T / sqrt(d)) V as the course has it, written out, the same compiled, and our FlashAttention, all
on the same numbers. Forward and backward are timed in one run by events on the device, so neither can hide in the other; the device is
kept busy until the host has asked for both, so the medians are the device's time alone. Host is how long the host takes to ask for both:
where that is more than the device's time, a program that does nothing else is as slow as the host. The memory
before backward is what the forward's output and saved tensors hold: written out it grows with the square of the length, ours with the
length. In bf16 the compiler knows attention when it sees it and calls PyTorch's fused kernel instead: its memory then is as ours; in fp32
it does not. Head size 64 is compiled at every length, the others at the shortest and the longest. The rows *forward, not synchronised* are the published mistake on purpose: the host's clock, read as soon as the kernels were
asked for.

Rows with a *mask* are 16 heads by each of PyTorch's kernels. additive and boolean: a mask as a tensor, causal within a window, as
transformers gives it to SDPA; every score counts. none: causal, without such a mask."""
DATALOADER = """\
A batch costs the host a fixed time of work; the step is a chain of matrix products. The first row has its batch on the device already: it is
the least that the loop can take, and the waiting share of the others is what they take beyond it; from 5 % on the device is said to wait.
A batch that is on the host already shows what the copy alone costs. Workers prepare batches in processes of their own, prefetch is how
many each keeps ready; pinned memory lets the host ask for the copy and go on, where a copy of pageable memory holds it up."""
FLASH = """\
Causal FlashAttention, everything of one shape side by side in one run and on the same numbers. With 16 heads, at the lengths that
training has, as many sequences as make 8,192 tokens: PyTorch's flash and cuDNN backends (`flash`, `cudnn`), FlexAttention compiled with a
causal block mask (`flex`), our Triton kernels without Hopper's features (`plain`) and what `attention: triton` runs on this GPU (`ours`).
`attention: best` chooses by these rows. With one head and one sequence, as the published table of this exercise has it: ours, PyTorch's
own choice of kernel (`pytorch`); one head fills few of a large GPU's multiprocessors, so those are
rates of small work. The device is kept busy until the host has asked for forward and backward, so all rates are of the device's time
alone; it rests before each sample, or its power would exceed what it may draw. Host is how long the host takes to ask for both passes:
where that is more than the device's time, short sequences are as slow as the host. Rates count 2 products of n x n x d forward, 5 backward and 7 both, half of each masked."""
FUSION = """\
x of n rows [n, 2f] goes through RMSNorm and SwiGLU: h = x weight / sqrt(mean(x^2) + eps), y = silu(first half of h) times the second half.
It is run operation by operation (with the norm written out, and with PyTorch's own), compiled, as one Triton kernel and as one kernel in
CUDA C++ that nvcc builds on the spot. Least is what any way must move: x, the weight and y, each once. Moved is what the operations read
and write, each tensor of an operation once, of the compiled chain by the compiler's own count; what one kernel reads again from a cache
is not counted. GB/s are of the least, so that a way that moves more is slower and not faster; of a copy is that over the GB/s of the first row, a
copy of as many bytes in the same run. Launches are the profiler's. Every way is checked against fp64 first; the relative error is in the
table and may be twice that of the chain written out. The cache is flushed before each sample. The small chain is over so soon that its time
is that of the launches."""
GPU = """\
What the driver tells, and what was measured. Each level of memory is read again and again by all multiprocessors, in sets that fit
into it; nothing is written, what was read is added up and checked, and the reads are in the machine code of the loop (a test looks).
Device memory is read once, with its share of the data sheet's bandwidth. L1 and shared memory are one memory of each multiprocessor, so
their numbers are about equal. Registers have no row: an instruction names its registers, so their bandwidth is the rate of the
arithmetic, which the products tell. Then square matrix products of random data by dtype beside the data sheet's dense peak; copies
within memory with a flushed and with a warm cache (bytes read and written are both counted); copies to and from the host. Rows that are
*sustained* are a linear layer's products for two seconds without a pause, at the clocks that the power limit allows: `fp8` as torchao calls
them, of operands rounded beforehand; `fp8-casts` torchao's compiled layer, whose rate counts the products alone."""
KERNELS = """\
The course's sizes on the native decoder, batch 4, attention written out so that its parts are kernels of their own, AdamW. The median is
the harness's, without the profiler. Then one more step runs under `torch.profiler`, with ranges around the parts of the model: busy is the
sum of its kernels' times as the GPU's own clock has them, and the shares are of that; busy share is busy over the median, so what is
missing to 100 % is the GPU waiting for the host. Each kernel counts once, for the operation that launched it; a step that is profiled
again must have as many, and their sum may not exceed the median by more than 5 %, else the row has failed (on a GPU). `forward` is the forward of a training step, and every pass is a part of the same step.
Kernels of the backward count for the part whose forward made their node (autograd gives both one number). A product's share has what the
operation launches (split-K sums too), softmax has its casts; `scale and mask` has the kernels that make the mask. FLOPs of the core are 4 d for each score and
head size d in the forward and 8 d in the backward, masked ones too because written out they are computed, against 5 and 4 for softmax.
On a CPU (tiny form) the profiler's operations stand for kernels, and the profiler's own cost is in them.

`--files DIR` also writes a trace of each detailed point for https://ui.perfetto.dev (Chrome JSON, gzip); it is no part of the record. Each
kernel in it has `phase` and `part` among its arguments, the same that the tables are made of, and two tracks beside the stream's, *phases*
and *parts (by kernel)*, show them as ranges. A range reaches from its first kernel to its last; `busy` in its arguments leaves out the gaps."""
MEMORY = """\
The 2.7B model of the course on the native decoder, batch 4. `forward only` is without gradients, as for inference. Measured peaks are
the caching allocator's, phase by phase, of a step that nothing looks at; `of the first step` is that of the very first one, in which AdamW has
no state yet. Predicted is the virtual GPU's ledger of the same recipe, replayed on the same allocator: no formula and no GPU. `off by` is the predicted
peak less the measured one. `before` is the built model, without batches and libraries' workspaces. Each point begins as a new process
does, the workspaces and the allocator's cache given back: what an earlier point leaves there would give the next one's tensors other places,
and so other remainders that the allocator does not split off. The
measured timeline and the largest holders come from one more step in which every storage is followed from its birth to its death; the
horizontal axis counts allocations and frees, not seconds. What libraries and the insides of kernels allocate is not in that timeline.
Categories are final ones: what becomes a gradient is one from its first byte, and of what a forward makes, activations are what is
alive as the backward begins. `made at` is the line of the model whose operation made it, in the backward the autograd node.
The residual stream's size is in bytes, MiB (2^20 bytes: what the course calls MB), MB (10^6) and GB (10^9).
On a CPU (tiny form) there is no caching allocator: live tensors are followed instead, and the ledger is that of a virtual CPU.

`--files DIR` also writes a snapshot of each detailed point for https://pytorch.org/memory_viz (CUDA only). It is no part of the record.
In it, allocations of the forward (and of the optimizer, where it makes any) have their Python stacks. Those that the backward makes have none, about half of a
whole step's: autograd makes them in a thread of its own, in which no Python runs. What was there before that run has none either. The
tables' largest holders name each by its autograd node instead."""
STREAMS = """\
Two lists of work that do not need each other, in one stream one after the other, and in two streams. Gain is the one time over the other. At
most is what hiding the shorter list wholly would give, by the parts of the run in one stream (a CUDA graph's parts are not known). Both ways
leave the same results, which is checked first.

What to look for: a second stream can help where the first leaves something idle. A copy of pinned memory runs on a copy engine beside the
kernels, each direction has an engine, and kernels of few blocks leave multiprocessors to others. It cannot help where one kernel fills the
GPU, nor where the GPU waits for the host, as with kernels that are over before the next is asked for; a CUDA graph asks for all of them at
once. Pageable memory is copied through a buffer by the host, so what is asked for after such a copy begins after it; what was asked for
before it can go on beside it. The first table is one product by three clocks."""
TRANSFORMER = """\
The course's five sizes on the native decoder, batch 4, 512 tokens, AdamW. One series of steps from the first one on: with w warm-up
steps it is of the first ten steps that count from step w on, by events on the device: in the first table the median after five, in the others mean ± standard
deviation of each part and of the whole.

A GPU at full load draws more than it may and lowers its clocks. A step in which that was seen is not counted, and from then on the GPU
rests up to a second before each step. A size whose own step is long enough for that says `throttled` and has no numbers: what it
takes in training, with the clocks that the GPU can hold, is measured with `trainfit measure`."""
