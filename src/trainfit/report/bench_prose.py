"""What each experiment's page says beside its records: the question, and what published results of the course got wrong."""

from dataclasses import dataclass

from trainfit.catalog.load import gpu

COURSE = "https://github.com/stanford-cs336/assignment2-systems"


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
    """

    title: str
    about: str
    claims: tuple[Claim, ...] = ()
    pivot: str = ""
    shows: str = ""
    besides: tuple[str, ...] = ()
    apart: str = ""


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
            ("before_backward_bytes",),
        ),
        "dataloader": Story("Loading data while the device computes", DATALOADER),
        "flash": Story("FlashAttention against PyTorch", FLASH, (), "body", "tflops_per_s", apart="heads"),
        "gpu": Story("What this GPU is", GPU),
        "transformer": Story("A training step of five sizes", TRANSFORMER, TRANSFORMER_CLAIMS),
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
on the same numbers. Forward and backward are timed in one run by events on the device, so neither can hide in the other. The memory
before backward is what the forward's output and saved tensors hold: written out it grows with the square of the length, ours with the
length. The rows *forward, not synchronised* are the published mistake on purpose: the host's clock, read as soon as the kernels were
asked for."""
DATALOADER = """\
A batch costs the host a fixed time of work; the step is a chain of matrix products. The first row has its batch on the host already: it is
the least that the loop can take, and the waiting share of the others is what they take beyond it. Workers prepare batches in processes of
their own, prefetch is how many each keeps ready, pinned memory lets the copy to the GPU go on beside its work."""
FLASH = """\
Causal FlashAttention, everything of one shape side by side in one run and on the same numbers. With 16 heads, at the lengths that
training has, as many sequences as make 8,192 tokens: PyTorch's flash and cuDNN backends (`flash`, `cudnn`), FlexAttention compiled with a
causal block mask (`flex`), our Triton kernels without Hopper's features (`plain`) and what `attention: triton` runs on this GPU (`ours`).
`attention: best` chooses by these rows. With one head and one sequence, as the published table of this exercise has it: ours, PyTorch's
own choice of kernel (`pytorch`), and attention written out (`eager`); one head fills few of a large GPU's multiprocessors, so those are
rates of small work. Rates count 2 products of n x n x d forward, 5 backward and 7 both, half of each masked."""
GPU = """\
What the driver tells, and what was measured: copies within memory with a flushed and with a warm cache (bytes read and written are both
counted), square matrix products of random data by dtype beside the data sheet's dense peak, copies to and from the host."""
TRANSFORMER = """\
The course's five sizes on the native decoder, batch 4, 512 tokens, AdamW. One series of steps from the first one on: with w warm-up
steps the row is of steps w to w + 9. Mean and standard deviation of forward, backward and optimizer are by events on the device."""
TRANSFORMER_CLAIMS = (
    Claim(
        "Times without warm-up, or of collectives without warm-up, given as the operation's time.",
        "The first step also loads kernels, picks algorithms and fills the allocator; compare the rows of 0 and 5 warm-up steps. The same "
        "holds of a first all-reduce, which also connects the GPUs.",
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
