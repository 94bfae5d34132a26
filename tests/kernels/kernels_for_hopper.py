"""Every Triton kernel of ours compiled for an H200, with the arguments its own launcher gives it. Needs no
GPU.

Run by test_kernels_compile.py in a process without Triton's interpreter. Each launcher is called as a
training step calls it, on tensors without memory (so that sizes over 2^31 cost nothing), in two steps;
Triton's launch is replaced by its compilation. Prints one JSON object: for each call the kernels that it
compiled, numbers about their PTX, and how many more the second step compiled. Names that start with "small"
are of FlashAttention's kernels for a GPU with 99 KB of shared memory.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain as chain_of
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from trainfit.bench.kernels import normed_swiglu, repeated_reads
from trainfit.kernels.cross_entropy import fused as fused_cross_entropy
from trainfit.kernels.cross_entropy import gradients_in_forward
from trainfit.kernels.cross_entropy.terms import Terms
from trainfit.kernels.decode_attention import op as decode_attention
from trainfit.kernels.embedding import op as embedding
from trainfit.kernels.flash_attention import triton_launch as flash_attention_launch
from trainfit.kernels.flash_attention.dispatch import (
    BACKWARD,
    IN_PASSES,
    backward_groups,
    forward_groups,
)
from trainfit.kernels.flash_attention.hopper import launch as flash_attention_tma
from trainfit.kernels.flash_attention.hopper import schedule as flash_attention_schedule
from trainfit.kernels.fp8_cast import op as fp8_cast
from trainfit.kernels.quantize import nf4
from trainfit.kernels.quantize import rowwise as rows
from trainfit.kernels.quantize.codebook import BLOCK
from trainfit.kernels.rms_norm import fp8 as rms_norm_fp8
from trainfit.kernels.rms_norm import op as rms_norm
from trainfit.kernels.rope import op as rope
from trainfit.kernels.rope import split
from trainfit.kernels.sampling import op as sampling
from trainfit.kernels.stochastic_rounding import op as stochastic_rounding
from trainfit.kernels.swiglu import fp8 as swiglu_fp8
from trainfit.kernels.swiglu import op as swiglu
from trainfit.optim import adafactor, adamw

BF16, FP32 = torch.bfloat16, torch.float32


class Driver:
    """What Triton asks before it compiles for a compute capability, ten times which is given."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


LARGE = 2**31 + 1024  # Elements of a weight that 32 bits cannot number, such as a stack of experts
Call = Callable[[int], Any]  # What a step does; it is given the step's number


def numbers(step: int) -> list[float]:
    group = {"betas": (0.9, 0.999), "lr": 1e-3 * step, "weight_decay": 0.1, "eps": 1e-8}
    return list(adamw.Numbers.of(group, step))


def seed(step: int) -> int:
    return stochastic_rounding.seed_of(0, 1, step)


def plain_adamw(dtype: torch.dtype, stochastic: bool, *shape: int) -> Call:
    p, g, m, v = (empty(*shape, dtype=dtype) for _ in range(4))
    return lambda step: adamw.triton_adamw(p, g, m, v, numbers(step), stochastic, seed(step))


def master_adamw(dtype: torch.dtype, *shape: int) -> Call:
    p, g = empty(*shape, dtype=dtype), empty(*shape, dtype=dtype)
    kept = [empty(*shape, dtype=FP32) for _ in range(3)]
    return lambda step: adamw.triton_adamw_master(p, g, *kept, numbers(step), 1.0)


def coded_adamw(bits: int, stochastic: bool, *shape: int) -> Call:
    p, g, numel = empty(*shape), empty(*shape), torch.Size(shape).numel()
    codes = empty(*shape, dtype=torch.uint8) if bits == 8 else empty(-(-numel // 2), dtype=torch.uint8)
    scales = empty(-(-numel // BLOCK[bits]), dtype=FP32)
    table = empty(4, 2**bits, dtype=FP32)
    return lambda step: adamw.triton_adamw_coded(
        p, g, codes, scales, codes, scales, table, numbers(step), stochastic, seed(step)
    )


def weighted_sum(*shape: int) -> Call:
    p, g = empty(*shape), empty(*shape)
    return lambda step: stochastic_rounding.triton_add_rounded(p, g, 1 - 1e-3 * step, -1e-3, seed(step))


def factored(dtype: torch.dtype, stochastic: bool, b: int, r: int, c: int) -> Call:
    p, g = empty(b, r, c, dtype=dtype), empty(b, r, c, dtype=dtype)
    row, col, mean, size = (empty(*shape, dtype=FP32) for shape in ((b, r), (b, c), (b,), ()))

    def run(step: int) -> None:
        adafactor.triton_squares(p, g)
        adafactor.triton_update_squares(g, row, col, mean)
        adafactor.triton_apply(p, g, row, col, mean, size, 1 - 1e-3 * step, stochastic, seed(step))

    return run


def normal_floats(dtype: torch.dtype, r: int, c: int) -> Call:
    weight, levels = empty(r, c, dtype=dtype), empty(272, dtype=FP32)
    blocks = -(-r * c // nf4.BLOCK)
    parts = (
        empty(blocks * 32, dtype=torch.uint8), empty(blocks, dtype=torch.uint8),
        empty(-(-blocks // nf4.GROUP), dtype=FP32), empty(1, dtype=FP32), levels,
    )  # fmt: skip

    def run(step: int) -> None:
        nf4.triton_quantize_blocks(weight, levels)
        nf4.triton_dequantize(weight, *parts, r, c)

    return run


def byte_rows(codes: torch.dtype, dtype: torch.dtype, r: int, c: int) -> Call:
    like, stored, scales = empty(0, dtype=dtype), empty(r, c, dtype=codes), empty(r, dtype=FP32)
    return lambda step: rows.triton_dequantize(like, stored, scales)


def transposed(r: int, c: int) -> Call:
    like, codes = empty(0), empty(r, c, dtype=rows.FP8)
    return lambda step: rows.triton_transpose(like, codes)


def attention(dtype: torch.dtype, d: int, n: int, b: int = 1) -> Call:
    q, k = empty(b, 8, n, d, dtype=dtype), empty(b, 2, n, d, dtype=dtype)
    lse = empty(b, 8, n, dtype=FP32)

    def run(step: int) -> None:
        flash_attention_launch.triton_forward(q, k, k, True, 0.1)
        flash_attention_launch.triton_backward(q, q, k, k, q, lse, True, 0.1)

    return run


def hopper_attention(d: int, n: int, is_causal: bool, b: int = 1) -> Call:
    """The kernels in Gluon."""
    q, k, lse = empty(b, 8, n, d), empty(b, 2, n, d), empty(b, 8, n, dtype=FP32)

    def run(step: int) -> None:
        flash_attention_tma.gluon_forward(q, k, k, is_causal, 0.1, forward_groups(d, n, 4))
        if d in BACKWARD:
            flash_attention_tma.backward(q, q, k, k, q, lse, is_causal, 0.1, backward_groups(d, n, 4))

    return run


def attention_in_passes(d: int, n: int) -> Call:
    """Hopper's backward of wide heads."""
    q, k, lse = empty(2, 8, n, d), empty(2, 2, n, d), empty(2, 8, n, dtype=FP32)
    how = IN_PASSES[flash_attention_launch.block_d(d)]
    return lambda step: flash_attention_launch.backward_in_passes(q, q, k, k, q, lse, True, 0.1, how)


def cross_entropy(dtype: torch.dtype, c: int, v: int, softcap: float, smoothing: float) -> Call:
    logits, targets = empty(c, v, dtype=dtype), empty(c, dtype=torch.int64)
    terms = Terms(smoothing, 1e-4)

    def run(step: int) -> None:
        for wants_gradient in (True, False):
            fused_cross_entropy.triton_cross_entropy(
                logits, targets, empty(dtype=FP32), 1.0, softcap, terms, wants_gradient
            )

    return run


def embedding_gradient(dtype: torch.dtype, v: int, e: int, n: int) -> Call:
    kept, gradient, tokens = empty(v, e, dtype=dtype), empty(n, e, dtype=dtype), empty(n, dtype=torch.int64)
    return lambda step: embedding.triton_add(kept, gradient, tokens, tokens, embedding.NO_PADDING)


def multiplication(dtype: torch.dtype, *shape: int) -> Call:
    x, ratio = empty(*shape, dtype=dtype), empty(dtype=FP32)
    return lambda step: gradients_in_forward.triton_multiply_unless_one(x, ratio)


def norm(dtype: torch.dtype, n: int, e: int) -> Call:
    x, weight, scale = empty(n, e, dtype=dtype), empty(e, dtype=dtype), empty(n, dtype=FP32)

    def run(step: int) -> None:
        rms_norm.triton_forward(x, weight, 1e-5)
        rms_norm.triton_backward(x, x, weight, scale)

    return run


def gates(dtype: torch.dtype, n: int, f: int) -> Call:
    gate, up = empty(n, 2 * f, dtype=dtype).chunk(2, 1)

    def run(step: int) -> None:
        swiglu.triton_backward(swiglu.triton_forward(gate, up), gate, up)

    return run


def gates_in_fp8(n: int, f: int) -> Call:
    both, gradient, amax = empty(n, 2 * f), empty(n, f), empty(1, dtype=FP32)

    def run(step: int) -> None:
        # The kernels that look for the largest magnitude: without their launchers' zeros on a device.
        swiglu_fp8._launch("swiglu_amax_kernel", swiglu_fp8.AMAX, both, amax)
        swiglu_fp8._launch("swiglu_backward_amax_kernel", swiglu_fp8.BACKWARD_AMAX, gradient, both, amax)
        swiglu_fp8.triton_forward(both, amax)
        swiglu_fp8.triton_backward(gradient, both, amax, amax)

    return run


def gates_by_earlier_scales(n: int, f: int) -> Call:
    both, gradient, history = empty(n, 2 * f), empty(n, f), empty(2, dtype=FP32)
    scale = empty(1, dtype=FP32)

    def run(step: int) -> None:
        swiglu_fp8.triton_delayed(both, history)
        swiglu_fp8.triton_backward_delayed(gradient, both, scale, history)

    return run


def norms_in_fp8(n: int, e: int) -> Call:
    x, weight, rstd, amax = empty(n, e), empty(e), empty(n, dtype=FP32), empty(1, dtype=FP32)

    def run(step: int) -> None:
        rms_norm_fp8.triton_amax(x, weight, 1e-5)
        rms_norm_fp8.triton_add_amax(x, x, weight, 1e-5)
        rms_norm_fp8.triton_backward_add(x, x, weight, rstd, x)
        for e5m2 in (False, True):
            fp8_cast.triton_cast_both(x, amax, e5m2)

    return run


def layouts_apart(n: int, e: int) -> Call:
    x, weight, rstd, amax = empty(n, e), empty(e), empty(n, dtype=FP32), empty(1, dtype=FP32)

    def run(step: int) -> None:
        rms_norm_fp8.triton_rows(x, weight, rstd, amax)
        rms_norm_fp8.triton_transposed(x, x, weight, rstd, amax)
        fp8_cast.triton_cast_rows(x, amax)
        fp8_cast.triton_cast_transposed(x, x, amax)

    return run


def weights_in_fp8(o: int, i: int) -> Call:
    codes, turned, none = (empty(*shape, dtype=fp8_cast.E4M3) for shape in ((o, i), (i, o), (0,)))
    weight, amax = empty(o, i), empty(1, dtype=FP32)

    def run(step: int) -> None:
        for transposed in (turned, none):
            fp8_cast.triton_cast(weight, amax, codes, transposed, amax)

    return run


def rotation(dtype: torch.dtype, b: int, n: int, d: int, r: int) -> Call:
    q, k = empty(b, n, 32, d, dtype=dtype).transpose(1, 2), empty(b, n, 8, d, dtype=dtype).transpose(1, 2)
    angles = empty(n, r // 2, dtype=FP32)
    return lambda step: [rope.triton_rotate(q, k, angles, angles, back) for back in (False, True)]


def split_rotation(dtype: torch.dtype, b: int, n: int, d: int) -> Call:
    qkv, angles = empty(b, n, (14 + 2 * 2) * d, dtype=dtype), empty(n, d // 2, dtype=dtype)

    def run(step: int) -> None:
        parts = split.triton_forward(qkv, angles, angles, 14, 2)
        split.triton_backward(*parts, angles, angles)

    return run


def chain(dtype: torch.dtype, n: int, f: int) -> Call:
    x, weight, y = empty(n, 2 * f, dtype=dtype), empty(2 * f, dtype=dtype), empty(n, f, dtype=dtype)
    return lambda step: normed_swiglu.triton_into(x, weight, y)


def reads(past_l1: bool) -> Call:
    x, how = empty(512 * repeated_reads.BLOCK, dtype=FP32), repeated_reads.Reads(512, 264, 1, 100)
    return lambda step: repeated_reads.triton_sums(x, how, past_l1=past_l1)


def machine_code(kernel: Any) -> str:
    """SASS from NVIDIA's disassembler, the instructions' bits left out."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def decoding(dtype: torch.dtype, b: int, h: int, k: int, m: int, d: int, window: int = 0) -> Call:
    q, keys = empty(b, h, d, dtype=dtype), empty(b, k, m, d, dtype=dtype)
    lengths, slopes = empty(b, dtype=torch.int32), empty(h, dtype=FP32) if window else None
    return lambda step: decode_attention.triton_decode(q, keys, keys, lengths, window, slopes)


def sample(dtype: torch.dtype, b: int, v: int) -> Call:
    logits, keys, least = empty(b, v, dtype=dtype), empty(b, 2, dtype=torch.int64), empty(b, dtype=FP32)
    return lambda step: [
        sampling.triton_sample(logits, keys, 1.25, noise, kept)
        for noise, kept in ((True, least), (False, None))
    ]


def calls() -> Iterator[tuple[str, Call]]:
    """Name and call, each with other types, alignments or widths of its arguments."""
    yield "adamw fp32", plain_adamw(FP32, False, 2047)
    yield "adamw bf16 at random", plain_adamw(BF16, True, 2048, 5400)
    yield "adamw large", plain_adamw(BF16, True, LARGE)
    yield "adamw master", master_adamw(BF16, 2048, 5400)
    yield "adamw master large and odd", master_adamw(BF16, LARGE + 1)
    for bits in (8, 4):
        yield f"adamw{bits}bit bf16 at random", coded_adamw(bits, True, 2048, 5400)
        yield f"adamw{bits}bit large and odd", coded_adamw(bits, False, LARGE + 1)
    yield "adafactor fp32", factored(FP32, False, 1, 8000, 2048)
    yield "adafactor bf16 at random", factored(BF16, True, 1, 2048, 5400)
    yield "weighted sum", weighted_sum(2048, 5400)
    yield "weighted sum large", weighted_sum(LARGE)
    yield "nf4 bf16", normal_floats(BF16, 4096, 14336)
    yield "nf4 large", normal_floats(BF16, LARGE // 1024, 1024)
    for name, codes in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        yield f"{name} bf16", byte_rows(codes, BF16, 4096, 14336)
    yield "transposed codes", transposed(4096, 14336)
    yield "attention bf16", attention(BF16, 128, 1024)
    yield "attention odd, of many sequences", attention(BF16, 80, 1000, b=2**16)
    for name, dtype in (("bf16", BF16), ("fp32", FP32)):
        yield f"norm {name}", norm(dtype, 8192, 4096)
        yield f"gates {name}", gates(dtype, 8192, 14336)
        yield f"rotation {name}", rotation(dtype, 2, 4096, 128, 128)
        yield f"split {name}", split_rotation(dtype, 2, 1024, 64)
    yield "gates in fp8, large", gates_in_fp8(2**18, 14336)
    yield "gates in fp8, odd", gates_in_fp8(260, 1543)
    yield "gates in fp8 by earlier scales, large", gates_by_earlier_scales(2**18, 14336)
    yield "gates in fp8 by earlier scales, odd", gates_by_earlier_scales(260, 1543)
    for sizes, shape in (("large", (2**21, 1040)), ("odd", (260, 1543))):
        yield f"weights in fp8, {sizes}", weights_in_fp8(*shape)
        yield f"layouts in fp8 apart, {sizes}", layouts_apart(*shape)
    for n, e in ((28672, 1536), (4096, 3584), (4096, 5120), (260, 1543), (2**18, rms_norm.MAX_SIZE)):
        yield f"norms in fp8 of {e}", norms_in_fp8(n, e)
    yield "norm large and odd", norm(BF16, 2**20, 2049)
    yield "norm of the longest row", norm(FP32, 8191, rms_norm.MAX_SIZE)
    yield "gates large", gates(BF16, 2**18, 14337)
    yield "split, large", split_rotation(BF16, 2**8, 4096, 128)
    yield "rotation of a part, large", rotation(BF16, 2**8, 4096, 80, 32)
    yield "decoding", decoding(BF16, 64, 12, 2, 1024, 128)
    yield "decoding by parts, a large cache, ALiBi and a window", decoding(FP32, 2, 32, 8, 2**22, 80, 4096)
    yield "samples", sample(BF16, 64, 151936)
    yield "samples of many rows", sample(FP32, 2**15, 128256)
    yield "chain bf16", chain(BF16, 32768, 4096)
    yield "chain large and odd", chain(BF16, 2**20, 2049)
    for past_l1 in (False, True):
        yield f"reads {'past' if past_l1 else 'through'} L1", reads(past_l1)
    yield "cross entropy bf16", cross_entropy(BF16, 2048, 131072, 0.0, 0.0)
    yield "cross entropy large, odd, all terms", cross_entropy(BF16, 2**17, 50257, 30.0, 0.1)
    yield "cross entropy fp32", cross_entropy(FP32, 2048, 128256, 0.0, 0.1)
    yield "embedding's gradient", embedding_gradient(BF16, 151936, 3584, 4096)
    yield "embedding's gradient, large and odd", embedding_gradient(FP32, 2**19, 5001, 2**19)
    yield "multiplication bf16", multiplication(BF16, 131072, 4096)
    yield "multiplication large and odd", multiplication(FP32, LARGE + 1)
    yield "attention on Hopper, heads of 64, many sequences", hopper_attention(64, 1000, False, b=2**16)
    yield "attention on Hopper, heads of 64, long", hopper_attention(64, 5000, True)
    yield "attention on Hopper, heads of 128", hopper_attention(128, 1000, True)
    yield "attention on Hopper, heads of 256", hopper_attention(256, 1000, True)
    for d in (256, 512):
        yield f"attention on Hopper in passes, heads of {d}", attention_in_passes(d, 1000)


def small_calls() -> Iterator[tuple[str, Call]]:
    """What takes most shared memory on a GPU of compute capability 8.9."""
    triton.runtime.driver.set_active(Driver(89))  # pyright: ignore[reportArgumentType]
    flash_attention_launch._shared_bytes = lambda device: 99 * 1024  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    for d, dtype in ((256, BF16), (256, FP32), (512, BF16)):
        yield f"small: attention {dtype}, heads of {d}", attention(dtype, d, 1024)


def blackwell_calls() -> Iterator[tuple[str, Call]]:
    """fp32 products, of which Triton compiled some to nothing for compute capability 10.0."""
    triton.runtime.driver.set_active(Driver(100))  # pyright: ignore[reportArgumentType]
    flash_attention_launch._shared_bytes = lambda device: 227 * 1024  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    flash_attention_launch._is_hopper = lambda device: False  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    for d in (64, 128):
        yield f"Blackwell: attention fp32, heads of {d}", attention(FP32, d, 1024)


def counts(ptx: str) -> dict[str, int]:
    """Return 16-byte loads and stores, fused multiply-adds and accesses to spilled values of one kernel."""
    wide = {"loads": ptx.count("ld.global.v4.b32"), "stores": ptx.count("st.global.v4.b32")}
    writes = ptx.count("st.global")
    return {**wide, "writes": writes, "fused": ptx.count("fma.rn.f32"), "spills": ptx.count(".local")}


def main() -> None:
    triton.runtime.driver.set_active(Driver(90))  # pyright: ignore[reportArgumentType]
    flash_attention_schedule.multiprocessors = lambda device: 132
    run, made = JITFunction.run, {}
    grids: list[tuple[int, ...]] = []

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel: Any = run(self, *args, grid=grid, warmup=True, **kwargs)
        grids.append((*grid, 1, 1)[:3])
        made[kernel.hash] = kernel  # and None is returned: a kernel that was given back would be launched

    JITFunction.run = compile_only
    report = {}
    for name, call in chain_of(calls(), small_calls(), blackwell_calls()):
        before = set(made)
        grids.clear()
        call(1)
        first = set(made) - before
        for step in (2, 3, 16, 1000):
            call(step)
        kernels = [made[key] for key in sorted(first)]
        report[name] = {
            "kernels": sorted(kernel.name for kernel in kernels),
            "compiled_later": len(set(made) - before - first),
            "largest_grid": [max(sizes) for sizes in zip(*grids, strict=True)],
            "ptx": {kernel.name: counts(kernel.asm["ptx"]) for kernel in kernels},
            "sass": {
                kernel.name: machine_code(kernel)
                for kernel in kernels
                if name.startswith("reads") or kernel.name.endswith(("fp8_kernel", "fp8_transposed_kernel"))
            },
            "shared_bytes": max((kernel.metadata.shared for kernel in kernels), default=0),
        }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
