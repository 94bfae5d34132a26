"""Kernels of whole training steps on a GPU, beside what the prediction expects of each kind.

    python -m evidence.scripts.step_kernels FOLDER [--gpu h100-sxm] [--only NAME,NAME] [--limit 450]

Qwen2.5 from scratch as llm.q's benchmark trains it (1,024 tokens a sequence, moments in bf16), with compiled
blocks and fused loss, 8 micro-batches a step; and Llama-3.1-8B with 8,192 tokens, for `--gpu h200`. FOLDER
gets NAME.json.gz, the trace of a step, and in step-kernels.jsonl a line a recipe: seconds of steps without
the profiler, then for each kind of kernels and each of the longest kernels its seconds, launches, FLOPs or
bytes, and the share of its roofline. Ledgers are traced first, several at a time; no recipe begins after
``--limit`` seconds. With ``--predict`` nothing runs, and predicted.jsonl gets what is predicted. A recipe
that is refused, or is predicted not to fit, is named in a line, and the next one begins.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from evidence.scripts.profiled_steps import record
from trainfit.api.recipes import read
from trainfit.catalog.load import gpu as gpu_row
from trainfit.catalog.load import model_config
from trainfit.explanation.trace.explain import HostOps, explain_trace
from trainfit.explanation.trace.kernels import kind_of_kernel
from trainfit.explanation.trace.read import FIRST_FACTOR, Trace, read_trace
from trainfit.ledger.ledger import Ledger, Op
from trainfit.prediction.machine import machine_of
from trainfit.prediction.predict import ledger_of, predict
from trainfit.prediction.time.device_time import FP8_PRODUCTS, least_s, part_of
from trainfit.prediction.time.peaks import peak_flops_per_s
from trainfit.prediction.time.roofline import device_seconds
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.parsing.recipe_file import merge, recipe_from
from trainfit.spec.provenance import commit, now
from trainfit.spec.recipe import Recipe

COMMON = [
    "model.implementation=native", "compile=block", "loss=fused", "batch.seq=1024", "batch.accumulate=8",
]  # fmt: skip
FUSED = ["precision=bf16", "accumulation=fused"]
KINDS = {
    "bf16": ["precision=bf16"], "fp8": ["precision=fp8"], 
    "fp8-kernels": ["precision=fp8", "block_kernels=fp8"],
    "fp8-scales": ["precision=fp8", "block_kernels=fp8", "fp8_weights=scales"],
    "fp8-codes": ["precision=fp8", "block_kernels=fp8", "fp8_weights=codes"],
    "fp8-layouts": ["precision=fp8", "block_kernels=fp8", "fp8_weights=both-layouts"],
    "fp8-delayed": ["precision=fp8", "block_kernels=fp8", "fp8_weights=scales", "fp8_scaling=delayed"],
    "fp8-fastest": [
        "precision=fp8", "block_kernels=fp8", "fp8_weights=both-layouts", "fp8_scaling=delayed",
    ],
    "fp8-fused": [
        "precision=fp8", "block_kernels=fp8", "fp8_weights=scales", "fp8_scaling=delayed",
        "accumulation=fused",
    ],
    "fp8-fastest-fused": [
        "precision=fp8", "block_kernels=fp8", "fp8_weights=both-layouts", "fp8_scaling=delayed",
        "accumulation=fused",
    ],
    "bf16-plan": [*FUSED, "block_kernels=triton", "compile=false"],
    "bf16-swiglu": [*FUSED, "block_kernels=swiglu"],
    "bf16-fused": [*FUSED, "block_kernels=swiglu-rope", "optimizer.implementation=triton"],
    "bf16-attention": [
        *FUSED, "block_kernels=swiglu-rope", "optimizer.implementation=triton", "attention=triton",
    ],
}  # fmt: skip
RECIPES = {
    f"{size}-{kind}": (f"qwen2.5-{size}", [f"batch.micro={micro}", *settings])
    for size, micro in (("0.5b", 32), ("7b", 4), ("1.5b", 32), ("3b", 16))
    for kind, settings in KINDS.items()
}
"""Micro-batches that fit an H100 without recomputation."""
RECIPES["3b-bf16-plan-8"] = ("qwen2.5-3b", ["batch.micro=8", *KINDS["bf16-plan"]])
"""Half as many sequences, so that gradients are added to their sums for half as many tokens."""
H200 = {
    "8b-bf16-8k": ["batch.micro=1", *FUSED, "block_kernels=triton", "compile=false", "attention=triton"],
    "8b-fp8-8k": ["batch.micro=2", *KINDS["fp8-fastest-fused"], "attention=triton"],
}  # fmt: skip
RECIPES |= {name: ("llama-3.1-8b", [*settings, "batch.seq=8192"]) for name, settings in H200.items()}
"""The fastest of recipes/speed/one-h200.yaml; an H100 is too small for them."""
TINY = {
    "hidden_size": 64, "intermediate_size": 1040, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "vocab_size": 512,
}  # fmt: skip
LONGEST = 25
"""Kernels of a recipe with a row of their own."""
WARMUP = 3
IDLE = ("busy_s", "waits_for_host_s", "between_kernels_s")


@dataclass
class Row:
    """Kernels of a kind, or of one name, in a step."""

    name: str
    num_kernels: int = 0
    seconds: float = 0.0
    least_s: float = 0.0
    """By the data sheet, as far as bytes and FLOPs are known."""
    expected_s: float = 0.0
    num_bytes: float = 0.0
    flops: float = 0.0

    @property
    def share(self) -> float:
        """Of the roofline that is reached; 0: not known."""
        return self.least_s / self.seconds if self.seconds else 0.0


def names_of(gpu: str) -> list[str]:
    """Return the recipes that are run on a GPU."""
    return [name for name in RECIPES if (name in H200) == (gpu == "h200")]


def recipe_of(name: str, gpu: str, *, tiny: bool = False) -> Recipe:
    """Return a recipe; ``tiny``: of few parameters and tokens, not compiled, to try the script on a CPU."""
    model, settings = RECIPES[name]
    recipe, _ = read(model, [*COMMON, *settings, f"hardware.gpu={gpu}"])
    if not tiny:
        return recipe
    config = model_config(model) | TINY
    changed = {"model": {"config": config}, "batch": {"micro": 1, "seq": 64}, "compile": False}
    return recipe_from(merge(recipe.content(), changed))


OWN = {"swiglu": "SwiGLU", "rms_norm": "norms", "fp8_cast": "casts to fp8"}
"""Part of a name -> kind, of trainfit's operators and their kernels."""


def compiled_kind(name: str) -> str:
    """Return the kind of a compiled kernel: whether it computes operands of products in fp8."""
    return f"compiled, {'fp8 casts' if any(product in name for product in FP8_PRODUCTS) else 'other'}"


def own_kind(name: str) -> str:
    """Return the kind of one of trainfit's kernels of elementwise work, or nothing."""
    return next((kind for part, kind in OWN.items() if part in name), "")


def kind_of_op(op: Op, *, updates: bool) -> str:
    """Return the kind of kernels that an entry of a ledger is measured as."""
    part = part_of(op)
    if updates:
        return "optimizer"
    if part != "memory":
        return "matrix products" if part == "products" else part
    if op.name.startswith("triton_"):
        return compiled_kind(op.name)
    if op.name.startswith("trainfit.") and (own := own_kind(op.name)):
        return own
    return "loss" if "cross_entropy" in op.name else "other"


def kind_of_measured(name: str) -> str:
    """Return the kind of a kernel by its name; compiled ones, and their casts to fp8, are kinds apart."""
    if name.startswith(("triton_poi", "triton_red", "triton_per")):
        return compiled_kind(name)
    if own := own_kind(name):
        return own
    kind = kind_of_kernel(name)
    if kind in ("matrix products", "attention", "optimizer"):
        return kind
    return "loss" if "cross_entropy" in name else "other"


def expected(ledger: Ledger, recipe: Recipe) -> tuple[dict[str, Row], dict[str, Row]]:
    """Return what the ledger holds of a step: by kind, and by the name of a compiled kernel."""
    machine = machine_of(recipe.hardware)
    seconds = device_seconds(ledger, machine)
    kinds, names = dict[str, Row](), dict[str, Row]()
    for op in ledger.steady_ops:
        segment, times = ledger.segments[op.segment], ledger.times(op)
        if id(op) not in seconds or segment.phase == "data":
            continue
        kind = kind_of_op(op, updates=segment.phase == "optimizer")
        for rows, name in ((kinds, kind), (names, op.name)):
            row = rows.setdefault(name, Row(name))
            row.num_kernels += times * op.calls
            row.expected_s += times * seconds[id(op)]
            row.least_s += times * max(least_s(op, machine.gpu))
            row.num_bytes += times * op.num_bytes
            row.flops += times * op.causal_flops
    return kinds, names


def measured(trace: Trace, gpu: Gpu) -> tuple[dict[str, Row], dict[str, Row]]:
    """Return what the marked steps ran: by kind, and by a kernel's name; products with FLOPs of their shapes.

    A step begins with the first kernel that it launched: what was launched before it is another's.
    """
    (device,) = trace.kernels
    kernels, launches, ops = trace.kernels[device], trace.launches, HostOps(trace)
    launch_of = {number: index for index, number in enumerate(launches.ids) if number > 0}
    first = min(one.begin_us for one in trace.steps)
    last = max(one.begin_us + one.duration_us for one in trace.steps)
    products_at = np.asarray(trace.flops_at)
    order = np.argsort(products_at, kind="stable")
    products_at, flops = products_at[order], np.asarray(trace.flops)[order]
    counted = set[int]()
    kinds, names = dict[str, Row](), dict[str, Row]()
    for duration, named, number in zip(kernels.durations, kernels.names, kernels.ids, strict=True):
        launch = launch_of.get(number)
        if launch is None or not first <= launches.begins[launch] < last:
            continue
        name = trace.names[named]
        kind = kind_of_measured(name)
        done, least = 0.0, 0.0
        if kind == "matrix products" and len(flops) and ops.around(launch) in FIRST_FACTOR:
            at = int(np.searchsorted(products_at, launches.begins[launch], side="right")) - 1
            done = 0.0 if at in counted else float(flops[max(0, at)])
            counted.add(at)  # A reduction of partial products is a kernel of the same operation.
            least = done / peak_flops_per_s(gpu, "fp8" if "_scaled_mm" in ops.around(launch) else "bf16")
        for rows, key in ((kinds, kind), (names, name)):
            row = rows.setdefault(key, Row(key))
            row.num_kernels += 1
            row.seconds += duration / 1e6
            row.flops += done
            row.least_s += least
    return kinds, names


def joined(found: dict[str, Row], known: dict[str, Row]) -> list[Row]:
    """Return measured rows, longest first, with bytes and expected seconds of the ledger's of their names."""
    for name, row in found.items():
        of_ledger = known.get(name)
        if of_ledger is None:
            continue
        row.expected_s, row.num_bytes = of_ledger.expected_s, of_ledger.num_bytes
        if not row.flops:
            row.flops, row.least_s = of_ledger.flops, of_ledger.least_s
    return sorted(found.values(), key=lambda row: -row.seconds)


def compared(trace_path: Path, ledger: Ledger, recipe: Recipe, active: int = 1) -> dict[str, Any]:
    """Return a trace's kernels beside the ledger's; seconds and launches are those of one step."""
    trace = read_trace(trace_path)
    facts = explain_trace(trace, trace_path)
    kinds, names = measured(trace, gpu_row(recipe.hardware.gpu))
    for row in (*kinds.values(), *names.values()):
        row.num_kernels //= active
        for field in ("seconds", "flops", "least_s"):
            setattr(row, field, getattr(row, field) / active)
    of_kinds, of_names = expected(ledger, recipe)
    rows = [asdict(row) | {"share": row.share} for row in joined(kinds, of_kinds)]
    longest = [asdict(row) | {"share": row.share} for row in joined(names, of_names)[:LONGEST]]
    idle = {
        name: getattr(facts, name) / active for name in ("busy_s", "waits_for_host_s", "between_kernels_s")
    }
    return {"kinds": rows, "kernels": longest, **idle}


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Predict a recipe, run it, and return both."""
    recipe = recipe_of(name, options.gpu, tiny=options.tiny)
    ledger, predicted = ledger_of(recipe), predict(recipe)
    if not predicted.fits:
        needed = f"{predicted.peak_device_bytes / 2**30:.1f} GiB on {options.gpu}"
        raise InputError(f"{needed}, which has less", "name a recipe that fits", field="batch.micro")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = options.folder / f"{name}.json.gz"
    ran_on = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    seconds = record(recipe, device, path, warmup=WARMUP, active=1)
    tokens = recipe.micro_sequences * recipe.batch.seq * recipe.batch.accumulate
    step_s = median(seconds[1:])
    row = {
        "name": name, "recipe": recipe.content(), "torch": torch.__version__, "device": ran_on,
        "steps_s": seconds, "step_s": step_s, "tokens_per_s": tokens / step_s,
        "predicted_s": predicted.step_s, "clock": clock(),
    }  # fmt: skip
    return row | (compared(path, ledger, recipe) if device.type == "cuda" else {})


def prediction(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what is predicted of a recipe, to be committed before it is measured."""
    recipe = recipe_of(name, options.gpu, tiny=options.tiny)
    ledger, found = ledger_of(recipe), predict(recipe)
    kinds, _ = expected(ledger, recipe)
    bounds = found.bounds["step_s"]
    return {
        "name": name, "commit": commit(), "created_at": now(), "recipe": recipe.content(),
        "versions": found.versions, "step_s": found.step_s, "bounds_s": [bounds.low, bounds.high],
        "tokens_per_s": found.tokens_per_s, "peak_allocated_bytes": found.peak_allocated_bytes,
        "peak_device_bytes": found.peak_device_bytes, "fits": found.fits,
        "kinds": [asdict(row) for row in sorted(kinds.values(), key=lambda row: -row.expected_s)],
    }  # fmt: skip


def clock() -> str:
    """Return the GPU's clock and power after the steps, as nvidia-smi prints them; empty without one."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except OSError:
        return ""


def table(rows: list[dict[str, Any]]) -> str:
    """Return a short table: a line a recipe, then its kinds."""
    lines = [f"{'':26}{'ms':>9}{'expected':>9}{'roofline':>9}{'kernels':>9}"]
    for row in rows:
        least, tokens_per_s = 1e3 * (row["predicted_s"] or 0.0), row["tokens_per_s"]
        head = f"{row['name']} {tokens_per_s:,.0f} tokens/s"
        lines.append(f"{head:26}{1e3 * row['step_s']:9.1f}{least:9.1f}  {row['clock']}")
        for kind in row.get("kinds", ()):
            share = f"{kind['share']:9.0%}" if kind["share"] else f"{'':9}"
            milliseconds = f"{1e3 * kind['seconds']:9.1f}{1e3 * kind['expected_s']:9.1f}"
            lines.append(f"  {kind['name']:24}{milliseconds}{share}{kind['num_kernels']:9,}")
        if "busy_s" in row:
            idle_s = row["waits_for_host_s"] + row["between_kernels_s"]
            lines.append(f"  {'idle (profiled)':24}{1e3 * idle_s:9.1f}")
    return "\n".join(lines)


def command(name: str, options: argparse.Namespace, *, only_traced: bool) -> list[str]:
    """Return the command that runs one recipe, or traces its ledger alone, in a process of its own."""
    small = ["--tiny"] if options.tiny else []
    module = [sys.executable, "-m", "evidence.scripts.step_kernels", str(options.folder)]
    module += ["--gpu", options.gpu]
    return [*module, "--only", name, "--trace" if only_traced else "--here", *small]


def run_all(names: list[str], options: argparse.Namespace) -> None:
    """Trace the ledgers of all recipes, then run one after another in processes of their own."""
    began = time.monotonic()
    with ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) // 2))) as pool:
        list(
            pool.map(
                lambda name: subprocess.run(command(name, options, only_traced=True), check=False), names
            )
        )
    for name in names:
        if time.monotonic() - began > options.limit:
            print(f"{name}: not begun, {options.limit:.0f} s have passed")
            continue
        subprocess.run(command(name, options, only_traced=False), check=False)
    path = options.folder / "step-kernels.jsonl"
    if path.exists():
        print(table([json.loads(line) for line in path.read_text("utf-8").splitlines()]))


def one(name: str, options: argparse.Namespace) -> None:
    """Trace one recipe's ledger, or run it and write its line."""
    if options.trace:
        ledger_of(recipe_of(name, options.gpu, tiny=options.tiny))
        return
    row = run(name, options)
    with (options.folder / "step-kernels.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", default="h100-sxm")
    parser.add_argument("--only", help="names, with commas between them; else all that are of the GPU")
    parser.add_argument("--limit", type=float, default=450.0, help="seconds after which no recipe begins")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try it without a GPU")
    parser.add_argument("--predict", action="store_true", help="predict alone, into predicted.jsonl")
    parser.add_argument("--trace", action="store_true", help="trace the ledger alone")
    parser.add_argument("--here", action="store_true", help="run one recipe in this process")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    names = options.only.split(",") if options.only else names_of(options.gpu)
    if unknown := sorted(set(names) - set(RECIPES)):
        parser.error(f"{unknown[0]} is none of {', '.join(RECIPES)}")
    if options.predict:
        with (options.folder / "predicted.jsonl").open("a", encoding="utf-8") as file:
            for name in names:
                try:
                    row = prediction(name, options)
                except InputError as error:
                    print(f"{name}: {error}")
                    continue
                print(f"{name}: {1e3 * row['step_s']:,.0f} ms, {row['tokens_per_s']:,.0f} tokens/s")
                file.write(json.dumps(row) + "\n")
    elif options.trace or options.here:
        try:
            one(names[0], options)
        except InputError as error:
            print(f"{names[0]}: {error}")
    else:
        run_all(names, options)


if __name__ == "__main__":
    main()
