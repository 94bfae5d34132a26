"""What each experiment's page says beside its records: the question, and what published results of the course got wrong."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainfit.catalog.load import gpu
from trainfit.report import bench_said
from trainfit.report.bench_table import Grid
from trainfit.report.flash_goals import goals
from trainfit.spec.bench import BenchRow


@dataclass(frozen=True)
class Claim:
    """Something published, and what is right instead; ``source`` is an address where one is known."""

    said: str
    right: str
    source: str = ""


@dataclass(frozen=True)
class Story:
    """A page's words. ``pivot``: the part of a point whose values become columns of the page's tables; ``shows``: the number in them.

    ``besides``: other numbers, each with a table of its own. ``apart``: the part of a point whose values have tables of their own.
    ``beside_pass``: the pass whose rows the tables of ``besides`` have; a number that no such row has is shown of those that have it.
    ``said``: sentences made of a run's rows. ``first``: a table before all others.
    """

    title: str
    about: str
    claims: tuple[Claim, ...] = ()
    pivot: str = ""
    shows: str = ""
    besides: tuple[str, ...] = ()
    apart: str = ""
    said: Callable[[Sequence[BenchRow]], str] = lambda rows: ""
    beside_pass: str = "both"
    first: Callable[[Sequence[BenchRow]], Grid | None] = lambda rows: None


def stories() -> dict[str, Story]:
    """Every experiment's words, by name."""
    return {
        "accumulation": Story("Adding many small floats", ACCUMULATION, ACCUMULATION_CLAIMS),
        "autocast": Story("Which dtype autocast gives", AUTOCAST, AUTOCAST_CLAIMS),
        "attention": Story(
            "Attention: time and memory",
            ATTENTION,
            (_unsynchronised(),),
            "body",
            "median_s",
            ("before_backward_bytes", "host_s"),
        ),
        "dataloader": Story("Loading data while the device computes", DATALOADER),
        "flash": Story(
            "FlashAttention against PyTorch",
            FLASH,
            (),
            "body",
            "tflops_per_s",
            ("host_s",),
            apart="heads",
            first=goals,
        ),
        "fusion": Story("One elementwise chain, four ways", FUSION),
        "gpu": Story("What this GPU is", GPU),
        "kernels": Story(
            "Where a training step's time goes", KERNELS, KERNELS_CLAIMS, said=bench_said.of_kernels
        ),
        "memory": Story("Memory through a step", MEMORY, MEMORY_CLAIMS),
        "streams": Story("When a second stream helps", STREAMS, STREAMS_CLAIMS),
        "transformer": Story(
            "A training step of five sizes",
            TRANSFORMER,
            TRANSFORMER_CLAIMS,
            "warm-up",
            "median_s",
            ("forward_mean_s", "backward_mean_s", "optimizer_mean_s", "total_mean_s"),
        ),
    }


ACCUMULATION = """\
1000 times 0.01 is added up in four ways, and many floats of magnitudes 1e-4 to 1e4 in five orders. The error is relative to the exactly
rounded sum. The five orders are plain Python loops over fp32 scalars: their times compare with each other and with nothing else."""
ACCUMULATION_CLAIMS = (
    Claim(
        "Adding fp16 values into an fp32 sum is nearly as good as fp32 throughout.",
        "It is 10.0021 against 10.0001: the error is 16 times as large, and no order of addition would help, because fp16's nearest "
        "to 0.01 is 0.01000213623. What an fp32 accumulator saves is the sum (9.9531 in fp16), not what was rounded before it came.",
        "https://github.com/copecc/CS336",
    ),
)
AUTOCAST = """\
Each entry is found by running it under `torch.autocast`: the output's dtype of fp32 inputs, and of inputs that are low already. The
components are those of the course's toy model (linear, ReLU, LayerNorm, linear, cross-entropy). The CPU's lists are not CUDA's:
a CPU leaves LayerNorm and softmax in their input's dtype, CUDA runs them in fp32."""
AUTOCAST_CLAIMS = (
    Claim(
        "The loss is fp16, as the logits are.",
        "The loss is fp32: cross-entropy is on autocast's fp32 list, so the logits are cast before it. The table below says what each "
        "component got.",
    ),
)
ATTENTION = """\
Batch 8, one head, unmasked: softmax(Q K^T / sqrt(d)) V as the course has it, written out, the same compiled, and our FlashAttention, all
on the same numbers. Forward and backward are timed in one run by events on the device, so neither can hide in the other; the device is
kept busy until the host has asked for both, so the medians are the device's time alone. Host is how long the host takes to ask for both:
where that is more than the device's time, a program that does nothing else is as slow as the host. The memory
before backward is what the forward's output and saved tensors hold: written out it grows with the square of the length, ours with the
length. The rows *forward, not synchronised* are the published mistake on purpose: the host's clock, read as soon as the kernels were
asked for."""
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
within memory with a flushed and with a warm cache (bytes read and written are both counted); copies to and from the host."""
DAMEK = "https://github.com/damek/cs336-assignment2-systems/blob/main/cs336_systems/outputs"
GAOYUE = "https://github.com/GAOYUEtianc/Stanford-CS336-assignments/blob/main/assignment2-systems/answers.md"
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

`--files DIR` also writes a trace of each detailed point for https://ui.perfetto.dev (Chrome JSON, gzip); it is no part of the record."""
KERNELS_CLAIMS = (
    Claim(
        "Softmax is about 5 to 10 % of the time of attention's matrix products.",
        "Those products' times were estimated, not measured, and one of that report's own rows has 29.5 %. In the table of attention's core "
        "`time ratio` is products over softmax, both measured, beside `flops ratio`; the sentences above the tables say how "
        "they come out. Softmax and the mask read and write every score in memory and compute little, so FLOPs say nothing of their time.",
        f"{DAMEK}/nsys_report.md",
    ),
    Claim(
        "In every forward 30 to 55 % of the time is matrix products and 3 to 4 % softmax.",
        "That table is, as it says itself, estimated from the architecture. The shares below are of the kernels that ran.",
        f"{DAMEK}/nsys_report.md",
    ),
    Claim(
        "Attention's products have about 206 times the FLOPs of softmax (head size 64).",
        "4 x 64 FLOPs a score against 5 (compare, subtract, exp, add, divide) are 51 times. 206 times would leave softmax 1.2 FLOPs a score.",
        GAOYUE,
    ),
    Claim(
        "A share of less than 10 % that is 12.2 %.",
        "We know this claim by hearsay and did not find where it was published, nor which share was meant. Nearest to it are the 5 to 10 % "
        "above and a softmax of 12.3 % of a forward in another report. What it can be held against are softmax's share of a forward and the "
        "optimizer's of a whole step. The sentences above the tables have the least and the greatest of both: neither is a constant, each "
        "depends on size, precision and context, so a bound without these three says nothing.",
    ),
)
MEMORY = """\
The 2.7B model of the course on the native decoder, batch 4. `forward only` is without gradients, as for inference. Measured peaks are
the caching allocator's, phase by phase, of a step that nothing looks at; `first peak` is that of the very first step, in which AdamW has
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

`--files DIR` also writes a snapshot of each detailed point for https://pytorch.org/memory_viz, with the Python stack of each allocation
of one run (CUDA only; what was there before that run has no stack). It is no part of the record."""
MEMORY_CLAIMS = (
    Claim(
        "A training step of the 2.7B model takes 51.4 GB at a context of 128, of 256 and of 512: the activations are gone before the "
        "optimizer's state comes, so the context does not matter.",
        "That is so in the first step alone. From the second one on AdamW's state is there while the forward makes its activations, so "
        "the peak grows with the context once they outweigh the gradients that come later: compare `first peak` with `peak`.",
        f"{DAMEK}/memory_viz_report.md",
    ),
    Claim(
        "Mixed precision does not change the memory of a training step.",
        "It does, in both directions, and again the first step hides it: autocast keeps a bf16 copy of every matrix it multiplies with "
        "(half the weights' bytes) until its context ends, and fp32 copies where softmax asks for them, while activations that are saved in "
        "bf16 take half. Compare the two precisions at each context below, forward only and whole step.",
        f"{DAMEK}/memory_viz_report.md",
    ),
)
STREAMS = """\
Two lists of work that do not need each other, in one stream one after the other, and in two streams. Gain is the one time over the other. At
most is what hiding the shorter list wholly would give, by the parts of the run in one stream (a CUDA graph's parts are not known). Both ways
leave the same results, which is checked first.

What to look for: a second stream can help where the first leaves something idle. A copy of pinned memory runs on a copy engine beside the
kernels, each direction has an engine, and kernels of few blocks leave multiprocessors to others. It cannot help where one kernel fills the
GPU, nor where the GPU waits for the host, as with kernels that are over before the next is asked for; a CUDA graph asks for all of them at
once. Pageable memory is copied through a buffer by the host, so what is asked for after such a copy begins after it; what was asked for
before it can go on beside it. The first table is one product by three clocks."""
STREAMS_CLAIMS = (
    Claim(
        "Times by the host's clock around a call that returns before the GPU is done.",
        "The first table times one product by the host's clock without and with synchronisation, and by events on the device. Without, it is "
        "the time to ask for the product; where that is less than the data sheet allows, the row says impossible.",
    ),
)
TRANSFORMER = """\
The course's five sizes on the native decoder, batch 4, 512 tokens, AdamW. One series of steps from the first one on: with w warm-up
steps it is of steps w to w + 9: the median first, then mean ± standard deviation of each part and of the whole, by events on the device.

A GPU at full load draws more than it may and lowers its clocks. A step in which that was seen is not counted, and from then on the GPU
rests up to a second before each step. A size whose own step is long enough for that says `throttled` and has no numbers: what it
takes in training, with the clocks that the GPU can hold, is measured with `trainfit measure`."""
TRANSFORMER_CLAIMS = (
    Claim(
        "Times without warm-up, or of collectives without warm-up, given as the operation's time.",
        "The first step also loads kernels, picks algorithms and fills the allocator; compare the rows of 0 and 5 warm-up steps. The same "
        "holds of a first all-reduce, which also sets up the communicator and connects the GPUs: it is warmed up before it is timed.",
    ),
)


def _unsynchronised() -> Claim:
    """How many tokens a forward of 0.23 ms can have had at the most, by the data sheet."""
    h200, seconds, batch = gpu("h200"), 0.23e-3, 8
    peak = h200.peak_flops_per_s["fp32"]
    most = {d: int((peak * seconds / (4 * batch * d)) ** 0.5) for d in (16, 64, 128)}
    limits = ", ".join(f"{tokens:,} tokens of head size {d}" for d, tokens in most.items())
    return Claim(
        "0.23 ms for an attention forward, timed on the host without synchronisation.",
        f"That is the time to ask for the kernels. In 0.23 ms an {h200.title} at its data sheet's fp32 peak does batch {batch} of at most "
        f"{limits}. Times below what the data sheet allows are marked impossible here, and make no rate.",
    )
