"""Command line of the package; see its docstring."""

import argparse
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from evidence.scripts.library_scripts.scripts import SCRIPTS, prepared

NAMES = (
    "torch",
    "triton",
    "transformers",
    "trl",
    "accelerate",
    "peft",
    "bitsandbytes",
    "liger-kernel",
    "lightning",
)
GPU = "h100-sxm"


def versions() -> dict[str, str]:
    """Return the versions of the libraries that are installed."""
    from trainfit.spec.provenance import installed_version

    found = {name: installed_version(name) for name in NAMES}
    return {name: version for name, version in found.items() if version is not None}


def predict(name: str) -> dict[str, Any]:
    """Trace a script on the virtual GPU."""
    import trainfit
    from trainfit.spec.provenance import commit

    begun = time.perf_counter()
    with prepared(name) as script:
        estimate = trainfit.trace(script, gpu=GPU)
    content = estimate.model_dump(mode="json", exclude={"assumptions"})
    return {
        "script": name, "commit": commit(), "versions": versions(), "trace_s": time.perf_counter() - begun,
        "estimate": content,
    }  # fmt: skip


def measure(name: str) -> dict[str, Any]:
    """Run a script on the GPU; steps end where the optimizer's ``step`` returns."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    events: list[Any] = []

    def step_done(*_: Any) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        events.append(event)

    register_optimizer_step_post_hook(step_done)
    with prepared(name) as script:
        script()
    torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
    return {
        "script": name, "versions": versions(), "device": torch.cuda.get_device_name(),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(), "step_s": seconds,
    }  # fmt: skip


def in_own_process(verb: str, name: str, limit_s: float) -> dict[str, Any]:
    """Return the result of a script in a process of its own; an error is a result."""
    command = [sys.executable, "-m", "evidence.scripts.library_scripts", verb, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"script": name, "error": f"not done in {limit_s:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"script": name, "error": (done.stderr.strip().splitlines() or ["no output"])[-1][:500]}
    return json.loads(lines[-1])


def table(predicted: Path, measured: Path) -> None:
    """Print peaks and steps side by side; the step is the median without the first three."""
    rows = {one["script"]: one for one in map(json.loads, predicted.read_text().splitlines())}
    print(f"{'script':24} {'allocated':>12} {'off':>8} {'reserved off':>13} {'step ms':>9} {'off':>8}")
    for found in map(json.loads, measured.read_text().splitlines()):
        name, before = found["script"], rows.get(found["script"], {})
        if "error" in found or "estimate" not in before:
            print(f"{name:24} {found.get('error') or before.get('error')}")
            continue
        estimate, step_s = before["estimate"], median(found["step_s"][3:])
        peak = found["peak_allocated_bytes"]
        off = estimate["peak_allocated_bytes"] / peak - 1
        reserved = estimate["peak_reserved_bytes"] / found["peak_reserved_bytes"] - 1
        time_off = estimate["step_s"] / step_s - 1
        print(f"{name:24} {peak:12,} {off:8.3%} {reserved:13.2%} {step_s * 1e3:9.1f} {time_off:8.1%}")


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["predict", "run", "table", "predict-one", "measure-one"])
    parser.add_argument("arguments", nargs="+")
    parser.add_argument("--limit-s", type=float, default=600.0, help="Of each script.")
    given = parser.parse_args()
    first, *rest = given.arguments
    if given.command == "predict-one":
        print(json.dumps(predict(first)))
    elif given.command == "measure-one":
        print(json.dumps(measure(first)))
    elif given.command == "table":
        table(Path(first), Path(rest[0]))
    else:
        verb = "predict-one" if given.command == "predict" else "measure-one"
        out = Path(first if given.command == "predict" else rest[0])
        names = rest if given.command == "predict" else rest[1:]
        for name in names or SCRIPTS:
            found = in_own_process(verb, name, given.limit_s)
            with out.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(name, found.get("error", "done"), file=sys.stderr)
        if given.command == "run":
            table(Path(first), out)


if __name__ == "__main__":
    main()
