"""Recipes measured on a GPU together with where its driver put each segment, for predictions to be replayed
there.

Which of two free blocks of equal size is handed out depends on their addresses, and a free block that is up
to a MiB larger than what is requested is handed out whole: so peaks depend on what only the driver knows.
With it, a prediction must agree in every phase to the byte; a request or a free that the virtual GPU misses
would show.

``python tests/gpu/driver_addresses.py RECIPES RUNS`` measures, in processes of their own that record the
allocator's history.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.ledger import Ledger
from trainfit.ledger.replay import replay
from trainfit.measurement.environment import host_environment
from trainfit.measurement.fork_server import ready_to_fork
from trainfit.measurement.process import die_with_parent, run_in
from trainfit.measurement.trial import run_trial
from trainfit.measurement.trial_files import TrialRequest
from trainfit.prediction.predict import ledger_of
from trainfit.records import read_jsonl
from trainfit.spec.parsing.parse import parse
from trainfit.spec.parsing.recipe_file import recipe_from, recipe_lines
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Measurement, Phases, Record
from trainfit.verification.this_machine import gpu_here

ADDRESSES = "addresses.json"


class Run(NamedTuple):
    """A measured run of a recipe."""

    measurement: Measurement
    segments: list[tuple[int, int]]  # (address, bytes), in the order in which the allocator took them
    held_bytes: int
    """What the process held before it built the model: imports may leave a tensor on the device."""


def replayed(ledger: Ledger, run: Run) -> Phases:
    """The prediction's phases, had the driver put its segments where it put the run's."""
    allocator = CachingAllocator(segment_address=in_order(run.segments))
    allocator.malloc(run.held_bytes)
    return replay(ledger, allocator, empty_cache_after_init=True).phases


def in_order(segments: Iterable[tuple[int, int]]) -> Callable[[int], int]:
    """The address of each segment that is requested: of the next one, which must be as large."""
    following = iter(segments)

    def place(num_bytes: int) -> int:
        address, size = next(following)
        assert size == num_bytes, f"a segment of {num_bytes} bytes is requested, the run took one of {size}"
        return address

    return place


def differences(recipe: Recipe, run: Run) -> dict[str, int]:
    """Bytes by which phases of the measured run are higher than the prediction replayed with its addresses,
    where they are.

    The ledger is the one that a prediction in another process has kept, else it is traced here.
    """
    measurement = run.measurement
    assert measurement.status == "done", measurement.message
    assert measurement.phases is not None
    expected, found = peaks(replayed(ledger_of(recipe), run)), peaks(measurement.phases)
    return {phase: found[phase] - expected[phase] for phase in expected if found[phase] != expected[phase]}


def peaks(phases: Phases) -> dict[str, int]:
    """Bytes by step and phase."""
    steps = {"first": phases.first.model_dump(), "steady": phases.steady.model_dump()}
    highest = {f"{step} {phase}": size for step, found in steps.items() for phase, size in found.items()}
    return {"after init": phases.after_init} | highest


def predictions(recipes: Iterable[Recipe], folder: Path) -> dict[str, Record]:
    """Every recipe's prediction by its id, from processes that see no GPU."""
    source, records = _written(recipes, folder), folder / "records.jsonl"
    _python(
        "-c",
        "import sys; from trainfit.cli.main import main; sys.exit(main(sys.argv[1:]))",
        "sweep",
        str(source),
        "--out",
        str(records),
    )
    return {record.recipe_id: record for record in read_jsonl(records)}


def measured_runs(recipes: Iterable[Recipe], folder: Path) -> dict[str, Run]:
    """Every recipe's run by its id; they share Triton's cache, which is empty at first."""
    source, runs = _written(recipes, folder), folder / "runs.jsonl"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    _python(__file__, str(source), str(runs), PYTHONPATH=path, TRITON_CACHE_DIR=str(folder / "triton"))
    found: dict[str, Run] = {}
    for one in map(json.loads, runs.read_text().splitlines()):
        measurement = parse(Measurement, one["measurement"])
        found[measurement.recipe_id] = Run(measurement, one["segments"], one["held_bytes"])
    return found


def check_peaks(chosen: list[Recipe], folder: Path) -> None:
    """Measure recipes on this machine's GPU; fail unless each phase's peak is the predicted one.

    To the byte with segments where the driver put them, else within 1 %. The recipes are predicted for this
    GPU, whichever they name: compilers time kernels beside a buffer as large as its L2 cache.
    """
    gpu = gpu_here()[0].name
    chosen = [
        one.model_copy(update={"hardware": one.hardware.model_copy(update={"gpu": gpu})}) for one in chosen
    ]
    predicted, measured = predictions(chosen, folder), measured_runs(chosen, folder)
    assert [differences(one, measured[one.id]) for one in chosen] == [{}] * len(chosen)
    for one in chosen:
        estimate, peak = predicted[one.id].estimate, measured[one.id].measurement.peak_allocated_bytes
        assert estimate is not None
        assert peak is not None
        assert abs(peak / estimate.peak_allocated_bytes - 1) <= 0.01


def _written(recipes: Iterable[Recipe], folder: Path) -> Path:
    path = folder / "recipes.jsonl"
    path.write_text("".join(one.model_dump_json() + "\n" for one in recipes))
    return path


def _python(*arguments: str, **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def measure_all(recipes: Path, runs: Path) -> int:
    """One line a recipe into ``runs``."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that importing libraries leaves CUDA untouched
    start, host = ready_to_fork("cuda"), host_environment("cuda")
    with runs.open("w") as file:
        for recipe in (recipe_from(data) for _, data in recipe_lines(recipes)):
            request = TrialRequest(recipe=recipe, steps=0, warmup=2, device="cuda", environment=host)
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                measured, _ = run_in(folder, request, partial(start, module="driver_addresses"), 120)
                notes = folder / ADDRESSES
                known = (
                    json.loads(notes.read_text()) if notes.is_file() else {"segments": [], "held_bytes": 0}
                )
            file.write(json.dumps(known | {"measurement": measured.model_dump(mode="json")}) + "\n")
    return 0


def main(folder: Path) -> int:
    """The trial of ``folder``, and the segments that it took.

    Inductor's cache is empty, as predictions assume: kernels that it has timed for an earlier recipe would
    not be timed again, beside buffers that take segments.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")

    import torch

    torch.cuda.init()
    torch.cuda.memory._record_memory_history(enabled="all", context=None)
    for module in ("trainfit.models.hf", "transformers.models.llama.modeling_llama"):
        importlib.import_module(module)
    held = torch.cuda.memory_allocated()
    code = run_trial(folder)
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    segments = [(event["addr"], event["size"]) for event in events if event["action"] == "segment_alloc"]
    (folder / ADDRESSES).write_text(json.dumps({"segments": segments, "held_bytes": held}))
    return code


if __name__ == "__main__":
    if len(sys.argv) == 2:
        die_with_parent(os.getppid())
        sys.exit(main(Path(sys.argv[1])))
    sys.exit(measure_all(*map(Path, sys.argv[1:])))
