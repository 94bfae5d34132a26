"""Why a GPU of two is slower than one alone: variants of FSDP2's step of Llama-3.1-8B on two H200s.

    python -m evidence.scripts.scaling [RESULTS.jsonl] [--seconds 145] [--device cpu]

Both ranks first train alone, then together in each variant, in one start of the processes. Prints each
variant's step (rank 0, median), its speed over that of a GPU alone, and what the kernels of one step took;
RESULTS.jsonl gets a line a variant with the time of every kernel. With ``--device cpu``: a tiny model
through gloo, to try this program.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import socket
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from evidence.scripts.train_several_gpus import TINY
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.printable import say
from trainfit.spec.provenance import commit
from trainfit.spec.recipe import Recipe

Data = dict[str, Any]
MICROS = (4, 2)
"""Sequences of a micro-batch; the largest is the recipe's."""
SEQ = 4096
ALONE: Data = {
    "model": {"config": "llama-3.1-8b", "implementation": "native"},
    "batch": {"micro": MICROS[0], "seq": SEQ},
    "attention": "triton", "block_kernels": "triton", "loss": "fused",
    "hardware": {"gpu": "h200", "count": 1},
}  # fmt: skip
ON_CPU: Data = {
    "model": {**TINY["model"], "implementation": "native"},
    "batch": {"micro": MICROS[0], "seq": 32},
    "loss": "chunked",
    "hardware": {"gpu": "h200", "count": 1},
}
WARMUP, STEPS = 1, 4
CARVED_SMS = 16
"""SMs that products leave to NCCL."""
KINDS = (
    ("nccl", ("nccl",)),
    ("products", ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk")),
    ("attention", ("flash", "attn", "attention", "fmha")),
    ("copies", ("memcpy", "memset", "chunk_cat", "split_with_sizes", "catarray", "copy")),
)
"""Kind of a kernel -> parts of its name; all others are ``rest``."""


class Variants:
    """One rank's steps, and what is kept between them."""

    def __init__(self, device: torch.device, deadline: float, out: Path | None):
        self.device, self.deadline, self.out = device, deadline, out
        self.on_gpu = device.type == "cuda"
        self.alone: dict[int, float] = {}

    def out_of_time(self, needed_s: float) -> bool:
        """Return whether rank 0 says that less than ``needed_s`` is left."""
        late = torch.tensor(float(time.monotonic() + needed_s > self.deadline))
        dist.broadcast(late, 0)
        return bool(late)

    def agreed(self, problem: str) -> str:
        """Return the first rank's problem; empty if none has one."""
        problems: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        return next((f"rank {rank}: {one}" for rank, one in enumerate(problems) if one), "")

    def measure(self, name: str, step: Any, micros: tuple[int, ...]) -> None:
        """Time the step at each batch size and profile one of the first; print the row."""
        row: Data = {"variant": name, "step_ms": {}, "commit": commit()}
        loss = torch.zeros(())
        for micro in micros:
            batches = _batches(step, micro)

            def run(batches: Any = batches) -> None:
                nonlocal loss
                loss = step(batches)

            for _ in range(WARMUP):
                run()
            row["step_ms"][micro] = 1e3 * statistics.median(self.timed(run))
            if micro == MICROS[0]:
                row["kernels_ms"] = self.profiled(run)
        row["loss"] = loss.item()
        self.alone = self.alone or row["step_ms"]
        row["speed"] = {micro: self.alone[micro] / time_ms for micro, time_ms in row["step_ms"].items()}
        if self.on_gpu:
            row["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        if dist.get_rank() == 0:
            self.note(row)

    def note(self, row: Data) -> None:
        """Print a row, and write it."""
        if self.out is not None:
            with self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if "problem" in row:
            say(f"{row['variant']:34} {row['problem']}")
            return
        kinds: dict[str, float] = defaultdict(float)
        for kernel, time_ms in row["kernels_ms"].items():
            kinds[_kind(kernel)] += time_ms
        times = "".join(
            f"{row['step_ms'][micro]:9.1f} {row['speed'][micro]:6.1%}" if micro in row["speed"] else " " * 16
            for micro in MICROS
        )
        parts = "".join(f"{kinds[kind]:10.1f}" for kind in (*(kind for kind, _ in KINDS), "rest"))
        say(f"{row['variant']:34}{times}{parts}  {row['loss']:.4f}")

    def timed(self, run: Callable[[], None]) -> list[float]:
        """Return the seconds of each of STEPS steps."""
        if not self.on_gpu:
            begins = [time.perf_counter()]
            for _ in range(STEPS):
                run()
                begins.append(time.perf_counter())
            return [end - begin for begin, end in itertools.pairwise(begins)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
        torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(()))  # Through gloo: both ranks begin now.
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(events)]

    def profiled(self, run: Callable[[], None]) -> dict[str, float]:
        """Return the milliseconds of each kernel in one step, the longest first."""
        if not self.on_gpu:
            return {}
        from torch.profiler import ProfilerActivity, profile

        times: dict[str, float] = defaultdict(float)
        with suppress(Exception):  # A profiler that fails must not cost the times.
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                run()
                torch.cuda.synchronize()
            for event in seen.profiler.kineto_results.events():  # pyright: ignore
                if str(event.device_type()).endswith("CUDA"):
                    times[event.name()] += event.duration_ns() / 1e6
        return {name: round(time_ms, 3) for name, time_ms in sorted(times.items(), key=lambda one: -one[1])}

    def tried(
        self, name: str, needed_s: float, variant: Callable[[], Any], micros: tuple[int, ...] = MICROS
    ) -> None:
        """Enter a variant and measure it, unless the time is over; what fails on one rank is skipped."""
        if self.out_of_time(needed_s):
            if dist.get_rank() == 0:
                say(f"{name:34} left out: no time")
            return
        with ExitStack() as stack:
            problem = ""
            try:
                step = stack.enter_context(variant())
            except Exception as error:
                traceback.print_exc()
                problem = f"{type(error).__name__}: {error}"[:200]
            problem = self.agreed(problem)
            if problem:
                if dist.get_rank() == 0:
                    self.note({"variant": name, "problem": problem})
                return
            self.measure(name, step, micros)
            del step


def _kind(kernel: str) -> str:
    return next((kind for kind, parts in KINDS if any(part in kernel.lower() for part in parts)), "rest")


def _batches(step: Any, micro: int) -> list[Data]:
    return [{name: ids[:micro] for name, ids in batch.items()} for batch in step.random_batches()]


def _recipe(device: torch.device, count: int, **parallel: Any) -> Recipe:
    data = ALONE if device.type == "cuda" else ON_CPU
    both = {"hardware": {"gpu": "h200", "count": count}, "parallel": {"strategy": "fsdp", **parallel}}
    return recipe_from(data | both if count > 1 else data)


def _run(rank: int, port: int, device_type: str, out: Path | None, deadline: float) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    from trainfit.parallel.processes import local_device
    from trainfit.step import assemble

    device = local_device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=60)
    )
    variants = Variants(device, deadline, out if rank == 0 else None)
    if rank == 0:
        heads = "".join(f"{f'{micro} x {SEQ}, ms':>16}" for micro in MICROS)
        say(
            f"{'variant':34}{heads}"
            + "".join(f"{kind:>10}" for kind in (*(kind for kind, _ in KINDS), "rest"))
        )

    @contextmanager
    def alone() -> Iterator[Any]:
        yield assemble(_recipe(device, 1), device)

    variants.tried("alone, both at once", 0, alone)
    _emptied(device)

    recipe = _recipe(device, 2, reshard_after_forward=False)
    mesh = _mesh(recipe, device)
    step = assemble(recipe, device, mesh=mesh)
    _together(variants, step)
    del step
    _emptied(device)

    @contextmanager
    def built(around: Any = nullcontext, **parallel: Any) -> Iterator[Any]:
        with around():
            found = assemble(_recipe(device, 2, **parallel), device, mesh=mesh)
        yield found

    needed_s = 20.0 * variants.on_gpu
    for name, kept in (("kept", False), ("resharded", True)):
        variants.tried(
            f"{name}, by copy engines", needed_s,
            lambda kept=kept: built(copy_engines=True, reshard_after_forward=kept),
        )  # fmt: skip
        _emptied(device)
    two = lambda: built(_units_of_two, reshard_after_forward=False)  # noqa: E731
    variants.tried("kept, two blocks a unit", needed_s, two, MICROS[:1])
    sys.stdout.flush()
    os._exit(0)  # NCCL's communicators need not be left in order.


def _together(variants: Variants, step: Any) -> None:
    """Measure the variants that need no other model."""
    from trainfit.models.layers import decoder_blocks

    root = step_root(step)
    blocks: Any = list(decoder_blocks(step.model))
    on_gpu = variants.on_gpu

    @contextmanager
    def variant(reshard: bool = False, ahead: int = 0, around: Any = nullcontext) -> Iterator[Any]:
        for block in blocks:
            block.set_reshard_after_forward(reshard, recurse=False)
        _gathered_ahead(root, blocks, ahead)
        with around():
            yield step
        _gathered_ahead(root, blocks, 0)

    @contextmanager
    def carved() -> Iterator[None]:
        library = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch._C._set_sm_carveout_experimental(CARVED_SMS)
        yield
        torch._C._set_sm_carveout_experimental(None)
        torch.backends.cuda.preferred_blas_library(library)

    @contextmanager
    def normal_priority() -> Iterator[None]:
        context = root._get_fsdp_state()._comm_ctx
        names = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream")
        with ExitStack() as stack:
            for name in names if on_gpu else ():
                stack.enter_context(patch.object(context, name, torch.cuda.Stream(priority=0)))
            torch.cuda.synchronize() if on_gpu else None
            yield
            torch.cuda.synchronize() if on_gpu else None

    first = MICROS[:1]
    long_s, short_s = (14.0, 11.0) if on_gpu else (0.0, 0.0)
    variants.tried("kept after forward", long_s, variant)
    variants.tried("resharded", long_s, lambda: variant(reshard=True))
    if on_gpu:
        variants.tried(f"kept, {CARVED_SMS} SMs left", short_s, lambda: variant(around=carved), first)
    variants.tried("kept, gathered 2 ahead", short_s, lambda: variant(ahead=2), first)
    variants.tried("kept, normal priority", short_s, lambda: variant(around=normal_priority), first)
    variants.tried(
        "resharded, normal priority", short_s, lambda: variant(reshard=True, around=normal_priority), first
    )
    variants.tried("resharded, gathered 2 ahead", short_s, lambda: variant(reshard=True, ahead=2), first)


def step_root(step: Any) -> Any:
    """Return the outermost FSDP2 module of a step, in whose forward the loss runs."""
    from torch.distributed.fsdp import FSDPModule

    loss = step._loss
    cells = [cell.cell_contents for cell in (loss.__closure__ or ())] if loss is not None else []
    return next((one for one in cells if isinstance(one, FSDPModule)), step.model)


def _gathered_ahead(root: Any, blocks: list[Any], number: int) -> None:
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 :][:number])
        block.set_modules_to_backward_prefetch(blocks[:index][::-1][:number])
    root.set_modules_to_forward_prefetch(blocks[:number])
    root.set_modules_to_backward_prefetch(blocks[::-1][:number])


@contextmanager
def _units_of_two() -> Iterator[None]:
    """Let ``fully_shard`` take every two decoder blocks as one unit."""
    import torch.distributed.fsdp as fsdp

    shard, held = fsdp.fully_shard, []

    def by_two(module: Any, **options: Any) -> Any:
        if "reshard_after_forward" not in options:  # The outermost module
            return shard(module, **options)
        held.append(module)
        if len(held) == 2:
            shard(list(held), **options)
            held.clear()
        return module

    with patch.object(fsdp, "fully_shard", by_two):
        yield


def _mesh(recipe: Recipe, device: torch.device) -> Any:
    sizes = recipe.mesh.dimensions
    return dist.device_mesh.init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _emptied(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    """Start both ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=145.0, help="start no variant that ends later")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    chosen = parser.parse_args()
    deadline = time.monotonic() + chosen.seconds
    for name, value in (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")):
        os.environ.setdefault(name, value)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    multiprocessing.start_processes(
        _run, (port, chosen.device, chosen.out, deadline), nprocs=2, start_method="spawn"
    )


if __name__ == "__main__":
    main()
