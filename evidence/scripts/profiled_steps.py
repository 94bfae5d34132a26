"""Record traces of real steps on a GPU, and what ``trainfit explain`` says of them, predicted first.

    python -m evidence.scripts.profiled_steps FOLDER [--gpu h100-sxm] [--only NAME]

Three recipes: one that keeps the GPU busy with the optimizer of a few tokens (90 % busy, under 1 % MFU; six
layers as wide as Llama 3.1 70B's, so that few kernels are launched), one whose host cannot keep up, one as
it should be. FOLDER gets NAME.json.gz, the trace of three steps, and a line in profiled-steps.jsonl with the
prediction (time, busy, MFU) and the explanation.
"""

import argparse
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from trainfit.api.recipes import read
from trainfit.catalog.load import model_config
from trainfit.explanation.trace.explain import Given, explain_trace
from trainfit.explanation.trace.read import read_trace
from trainfit.prediction.estimate import matmul_dtype
from trainfit.prediction.predict import ledger_of, predict
from trainfit.spec.parsing.recipe_file import merge, recipe_from
from trainfit.spec.provenance import commit, now
from trainfit.spec.recipe import Recipe
from trainfit.step import assemble

RECIPES = {
    "busy-without-work": ("llama-3.1-70b", ["batch.micro=1", "batch.seq=16", "compile=block"]),
    "launch-bound": ("llama-3.2-1b", ["batch.micro=1", "batch.seq=16"]),
    "as-it-should-be": ("llama-3.2-1b", ["batch.micro=8", "batch.seq=2048", "loss=fused", "compile=block"]),
}
LAYERS = {"busy-without-work": 6}
WARMUP, ACTIVE = 5, 3


def record(
    recipe: Recipe, device: torch.device, path: Path, warmup: int = WARMUP, active: int = ACTIVE
) -> list[float]:
    """Write the trace of a few steady steps of a recipe; return the seconds of the steps before."""
    step, seconds = assemble(recipe, device), list[float]()
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(
        activities=activities,
        record_shapes=True,
        schedule=schedule(wait=warmup, warmup=2, active=active),
        on_trace_ready=lambda seen: seen.export_chrome_trace(str(path)),
        acc_events=True,
    ) as seen:
        for number in range(warmup + 2 + active):
            batches = step.random_batches(number)
            if number < warmup:
                synchronize()
            began = perf_counter()
            step(batches)
            if number < warmup:
                synchronize()
                seconds.append(perf_counter() - began)
            seen.step()
    return seconds


def measured(name: str, gpu: str, device: torch.device, folder: Path) -> dict[str, Any]:
    """Predict a recipe, record its trace, and return both with the explanation."""
    model, settings = RECIPES[name]
    recipe, _ = read(model, [*settings, f"hardware.gpu={gpu}"])
    if name in LAYERS:
        config = model_config(model) | {"num_hidden_layers": LAYERS[name]}
        recipe = recipe_from(merge(recipe.content(), {"model": {"config": config}}))
    predicted = predict(recipe)
    ledger, path = ledger_of(recipe), folder / f"{name}.json.gz"
    record(recipe, device, path)
    peak = (
        predicted.model_flops / predicted.step_s / predicted.mfu
        if predicted.step_s and predicted.mfu
        else None
    )
    given = Given(predicted.model_flops, peak, matmul_dtype(ledger))
    found = explain_trace(read_trace(path), path, given=given)
    time = predicted.time
    return {
        "name": name, "created_at": now(), "commit": commit(), "recipe": recipe.content(),
        "torch": torch.__version__, "trace_bytes": path.stat().st_size,
        "predicted": {"step_s": predicted.step_s, "mfu": predicted.mfu, "busy": time and time.busy},
        "explained": found.model_dump(mode="json") | {"file": path.name},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", default="h100-sxm")
    parser.add_argument("--only", choices=list(RECIPES))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in [options.only] if options.only else RECIPES:
        row = measured(name, options.gpu, torch.device("cuda"), options.folder)
        with (options.folder / "profiled-steps.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            name, row["predicted"], {key: row["explained"][key] for key in ("step_s", "busy_s", "window_s")}
        )


if __name__ == "__main__":
    main()
