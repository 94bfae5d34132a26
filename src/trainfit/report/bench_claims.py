"""What published results of the course got wrong, by experiment, and what is right; ``measured`` says what a run has to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainfit.catalog.load import gpu
from trainfit.report import bench_said, bench_said_attention, bench_said_device
from trainfit.spec.bench import BenchRow


@dataclass(frozen=True)
class Claim:
    """Something published, and what is right instead.

    ``source``: its address where one is known; ``measured``: a sentence from the rows of a run, empty where they have nothing to it.
    """

    said: str
    right: str
    source: str = ""
    measured: Callable[[Sequence[BenchRow]], str] = lambda rows: ""


DAMEK = "https://github.com/damek/cs336-assignment2-systems/blob/main/cs336_systems/outputs"
GAOYUE = "https://github.com/GAOYUEtianc/Stanford-CS336-assignments/blob/main/assignment2-systems/answers.md"
H1YORI = "https://github.com/H1yori233/CS336/blob/main/assignment2-systems/data"

ACCUMULATION = (
    Claim(
        "Adding fp16 values into an fp32 sum is nearly as good as fp32 throughout.",
        "It is 10.0021 against 10.0001, and no order of addition would help, because fp16's nearest to 0.01 is 0.01000213623. What an "
        "fp32 accumulator saves is the sum (9.9531 in fp16), not what was rounded before it came.",
        "https://github.com/copecc/CS336",
        bench_said_device.of_totals,
    ),
)
AUTOCAST = (
    Claim(
        "The loss is fp16, as the logits are.",
        "The loss is fp32: cross-entropy is on autocast's fp32 list, so the logits are cast before it. The table below says what each "
        "component got.",
        measured=bench_said_device.of_loss,
    ),
)
FLASH = (
    Claim(
        "One head's backward takes 0.12 ms at 128, at 256 and at 512 tokens.",
        "Sixteen times the work in the same time, so it is not the work that was timed but most likely how long the host takes to ask for "
        "it. The device is kept busy here until the host has asked, and the host's time has tables of its own.",
        f"{H1YORI}/flashattention_benchmark.md",
        bench_said_attention.of_asking_for_both,
    ),
)
KERNELS = (
    Claim(
        "Softmax is about 5 to 10 % of the time of attention's matrix products.",
        "Those products' times were estimated, not measured, and one of that report's own rows has 29.5 %. In the table of attention's core "
        "`time ratio` is products over softmax, both measured, beside `flops ratio`; the sentences at the top say how "
        "they come out. Softmax and the mask read and write every score in memory and compute little, so FLOPs say nothing of their time.",
        f"{DAMEK}/nsys_report.md",
    ),
    Claim(
        "In every forward 30 to 55 % of the time is matrix products and 3 to 4 % softmax.",
        "That table is, as it says itself, estimated from the architecture. The shares below are of the kernels that ran.",
        f"{DAMEK}/nsys_report.md",
        bench_said.of_products,
    ),
    Claim(
        "Attention's products have about 206 times the FLOPs of softmax (head size 64).",
        "4 x 64 FLOPs a score against 5 (compare, subtract, exp, add, divide) are 51 times. 206 times would leave softmax 1.2 FLOPs a score.",
        GAOYUE,
    ),
    Claim(
        "A share of less than 10 % that is 12.2 %.",
        "We know this claim by hearsay and did not find where it was published, nor which share was meant. Nearest to it are the 5 to 10 % "
        "above and a softmax of 12.3 % of a forward in another report. So this is what can be said: a share depends on size, precision and "
        "context, and a bound without these three says nothing.",
        measured=bench_said.of_small_shares,
    ),
)  # fmt: skip
MEMORY = (
    Claim(
        "A training step of the 2.7B model takes 51.4 GB at a context of 128, of 256 and of 512: the activations are gone before the "
        "optimizer's state comes, so the context does not matter.",
        "That is so in the first step alone. From the second one on AdamW's state is there while the forward makes its activations, so "
        "the peak grows with the context once they outweigh the gradients that come later.",
        f"{DAMEK}/memory_viz_report.md",
        bench_said.of_first_steps,
    ),
    Claim(
        "Mixed precision does not change the memory of a training step.",
        "It does, in both directions, and again the first step hides it: autocast keeps a bf16 copy of every matrix it multiplies with "
        "(half the weights' bytes) until its context ends, and fp32 copies where softmax asks for them, while activations that are saved in "
        "bf16 take half.",
        f"{DAMEK}/memory_viz_report.md",
        bench_said.of_mixed_precision,
    ),
)  # fmt: skip
STREAMS = (
    Claim(
        "Times by the host's clock around a call that returns before the GPU is done.",
        "The first table times one product by the host's clock without and with synchronisation, and by events on the device. Without, it is "
        "the time to ask for the product; where that is less than the data sheet allows, the row says impossible.",
        measured=bench_said_device.of_clocks,
    ),
)  # fmt: skip
TRANSFORMER = (
    Claim(
        "Times without warm-up, or of collectives without warm-up, given as the operation's time.",
        "The first step also loads kernels, picks algorithms, compiles and fills the allocator; compare the rows of 0 and 5 warm-up steps. "
        "The same holds of a first all-reduce, which also sets up the communicator and connects the GPUs: it is warmed up before it is timed.",
        measured=bench_said.of_warm_up,
    ),
)  # fmt: skip


def of_attention() -> tuple[Claim, ...]:
    """The claims about attention's times; the data sheet's numbers are the catalog's."""
    return (_unsynchronised(), _host_bound())


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
        measured=bench_said_attention.of_waiting,
    )


def _host_bound() -> Claim:
    return Claim(
        "A forward of 256 tokens takes 0.24 ms with head sizes of 16, 32, 64 and 128.",
        "Eight times the products in the same time, though this report does synchronise: at such sizes the device is done before the host "
        "has asked for the next kernel, so it is most of all the host that was timed.",
        f"{DAMEK}/attention_benchmark.md",
        bench_said_attention.of_asking,
    )
