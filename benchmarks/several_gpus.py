"""Predict and measure the peak memory of recipes for several GPUs of one host.

``python -m benchmarks.several_gpus predict OUT.jsonl`` predicts them without a GPU; ``... measure OUT.jsonl``
trains three steps of each on as many GPUs as the recipe counts, one process a GPU, and writes the peaks of
every rank. A line is one recipe: its id, the commit, versions, and bytes by phase.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from trainfit.spec.printable import say
from trainfit.spec.provenance import commit, now
from trainfit.spec.recipe import Recipe
from trainfit.spec.recipe_file import merge, recipe_from

Data = dict[str, Any]

SMALL: Data = {"model": {"config": "llama-3.2-1b"}, "batch": {"micro": 2, "seq": 2048}}
LARGE: Data = {"model": {"config": "llama-3.1-8b"}, "batch": {"micro": 1, "seq": 4096}}
TWO: Data = {"hardware": {"gpu": "h200", "count": 2}}
RECIPES: tuple[Data, ...] = (
    {**SMALL},
    {**SMALL, "precision": "fp32", "batch": {"micro": 1, "seq": 1024}},
    {**SMALL, "precision": "amp-bf16"},
    {**SMALL, "recompute": "full"},
    {**SMALL, "recompute": "selective", "optimizer": {"implementation": "foreach"}},
    {**SMALL, "adapter": {"kind": "lora"}},
    {**SMALL, "batch": {"micro": 1, "seq": 2048, "accumulate": 2}},
    {**SMALL, "parallel": {"replicate": 2}},
    {"model": {"config": "qwen3-0.6b", "implementation": "native"}, "batch": {"micro": 2, "seq": 2048}},
    {**SMALL, "compile": "block"},
    {**LARGE},
    {**LARGE, "recompute": "full", "batch": {"micro": 2, "seq": 8192}},
)
PHASES = ("forward", "backward", "optimizer")
STEPS = 3


def recipes() -> list[Recipe]:
    """Return the recipes of this comparison."""
    return [recipe_from(merge(one, TWO)) for one in RECIPES]


def predicted(recipe: Recipe) -> Data:
    """Return the predicted peaks of rank 0."""
    from trainfit.prediction.estimate import predict

    start = time.perf_counter()
    found = predict(recipe, use_cache=False)
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "phases": found.phases.model_dump(),
        "peak_allocated_bytes": found.peak_allocated_bytes,
        "peak_reserved_bytes": found.peak_reserved_bytes,
        "step_s": found.step_s,
        "traffic": [one.model_dump() for one in found.traffic],
        "versions": found.versions,
    }


def measured(recipe: Recipe) -> list[Data]:
    """Return the measured peaks of each rank, or what went wrong."""
    import torch

    count = recipe.hardware.count
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(_rank, (recipe.model_dump(mode="json"), count, folder), count)  # pyright: ignore[reportPrivateImportUsage]
        except Exception as error:
            return [{"error": f"{type(error).__name__}: {error}"[-600:]}]
        return [json.loads(Path(folder, f"{rank}.json").read_text("utf-8")) for rank in range(count)]


def _rank(rank: int, data: Data, world_size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from trainfit.step import assemble

    recipe = Recipe.model_validate(data)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, device_id=device)
    dimensions = recipe.mesh.dimensions
    mesh = init_device_mesh("cuda", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    step = assemble(recipe, device, mesh=mesh)
    torch.cuda.synchronize()
    after_init = torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    peaks: list[Data] = []
    times: list[float] = []
    reserved: list[int] = []
    for number in range(STEPS):
        batches = step.random_batches()
        one: Data = {}
        running = ""

        def on_phase(phase: str, one: Data = one) -> None:
            nonlocal running
            if running:
                one[running] = max(one.get(running, 0), torch.cuda.max_memory_allocated())
                reserved.append(torch.cuda.max_memory_reserved())
            torch.cuda.reset_peak_memory_stats()
            running = phase

        torch.cuda.synchronize()
        # NCCL's own barrier would allocate a tensor on the device.
        store.add(f"step {number}", 1)
        while store.add(f"step {number}", 0) < world_size:
            time.sleep(1e-4)
        start = time.perf_counter()
        step(batches, on_phase=on_phase)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        on_phase("")
        peaks.append(one)
        del batches
    found = {
        "after_init": after_init,
        "first": peaks[0],
        "steady": {phase: max(one[phase] for one in peaks[1:]) for phase in PHASES},
        "reserved": max(reserved),
        "step_s": min(times[1:]),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("predict", "measure"))
    parser.add_argument("into", type=Path, help="JSON Lines to append to")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of recipes")
    arguments = parser.parse_args()
    for number, recipe in enumerate(recipes()):
        if arguments.only and number not in arguments.only:
            continue
        row: Data = {"number": number, "recipe_id": recipe.id, "commit": commit(), "made_at": now()}
        if arguments.what == "predict":
            row |= {"predicted": predicted(recipe)}
        else:
            row |= {"ranks": measured(recipe)}
        with arguments.into.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        say(f"{number} {recipe.id} {json.dumps(row.get('predicted') or row['ranks'])[:150]}")


if __name__ == "__main__":
    main()
