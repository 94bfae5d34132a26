"""Techniques on a real GPU: losses of a CPU, results without the technique, no waits, predicted peaks."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from trainfit.records import read_jsonl
from trainfit.spec.parsing.recipe_file import merge, recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import PHASES, Phases, Record
from trainfit.step import Step, assemble

pytestmark = pytest.mark.gpu
CARD, CPU = torch.device("cuda"), torch.device("cpu")
MIB = 2**20
LLAMA = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip
LARGER = LLAMA | {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "vocab_size": 4096}
"""Large enough that a percent of its peak is more than the allocator's rounding."""
TERMS = {"label_smoothing": 0.1, "z_loss": 1e-4}
LORA = {"kind": "lora", "rank": 8}
IN_BACKWARD = {"optimizer": {"in_backward": True}}
BOTH = ("native", "hf")
MIXED = [{"recompute": "elementwise", "offload": 1.0, "count": 2}, "full", "none"]


class Case(NamedTuple):
    """Fields of a recipe over the control's, and what is true of it."""

    fields: dict[str, Any]
    same_as: dict[str, Any] | None = None  # Fields of a recipe that gives the same losses to the bit
    precision: str = "fp32"  # In which the losses are compared with a CPU's; what rounds at random needs bf16
    rel: float = 1e-3
    codes: tuple[str, ...] = ("native",)  # BOTH where hf's way is another than native's
    waits: bool = False  # Its optimizer or scaler asks the GPU for a number in each step


def rounded(name: str, **more: Any) -> Case:
    return Case({"optimizer": {"name": name, "stochastic_rounding": True} | more}, precision="bf16", rel=2e-2)


CASES = {
    "control": Case({}, codes=BOTH),
    "full": Case({"recompute": "full"}, {}, codes=BOTH),
    "every": Case({"recompute": {"every": 2}}, {}),
    "selective": Case({"recompute": "selective"}, {}, codes=BOTH),
    "layers": Case({"recompute": {"layers": MIXED}}, {}, codes=BOTH),
    "budget": Case({"compile": "block", "recompute": {"budget": 0.5}}),
    "activations": Case({"recompute": "full", "offload": {"activations": True}}, {}),
    "weights": Case(
        IN_BACKWARD | {"recompute": "full", "offload": {"activations": True, "weights": True}},
        IN_BACKWARD,
        codes=BOTH,
    ),
    "weights by block": Case(
        {"recompute": "full", "offload": {"weights": True}, "optimizer": {"in_backward": "block"}},
        IN_BACKWARD,
    ),
    "weights and adapter": Case(
        {"recompute": "full", "offload": {"weights": True}, "adapter": LORA}, {"adapter": LORA}
    ),
    "in backward": Case(IN_BACKWARD, {}),
    "by block": Case({"optimizer": {"in_backward": "block"}}, {}),
    "empty cache": Case({"empty_cache_every": 1}, {}),
    "clip": Case({"optimizer": {"clip_norm": 0.1}}),
    "chunked": Case({"loss": "chunked"}, codes=BOTH),
    "fused loss": Case({"loss": "fused"}, codes=BOTH),
    "loss terms": Case({"loss_terms": TERMS}),
    "fused loss terms": Case({"loss": "fused", "loss_terms": TERMS}),
    "block kernels": Case({"block_kernels": "triton"}, codes=BOTH),
    "block kernels compiled": Case({"block_kernels": "triton", "compile": "block"}),
    "SwiGLU kernels": Case({"block_kernels": "swiglu"}, codes=BOTH),
    "SwiGLU and rotation": Case({"block_kernels": "swiglu-rope"}),
    "SwiGLU and rotation compiled": Case({"block_kernels": "swiglu-rope", "compile": "block"}),
    "SwiGLU kernels compiled": Case({"block_kernels": "swiglu", "compile": "block"}),
    "accumulation": Case({"batch": {"accumulate": 2}}),
    "fused accumulation": Case({"batch": {"accumulate": 2}, "accumulation": "fused"}, codes=BOTH),
    "fused accumulation compiled": Case(
        {"batch": {"accumulate": 2}, "accumulation": "fused", "compile": "block"}
    ),
    "adamw triton": Case({"optimizer": {"implementation": "triton"}}),
    "adafactor": Case({"optimizer": {"name": "adafactor", "implementation": "fused"}}),
    "adafactor of torch": Case({"optimizer": {"name": "adafactor"}}, waits=True),
    "8 bits": Case({"optimizer": {"name": "adamw8bit"}}),
    "4 bits": Case({"optimizer": {"name": "adamw4bit"}}),
    "muon": Case({"optimizer": {"name": "muon"}}, rel=5e-3),
    "rounded adamw": rounded("adamw"),
    "rounded adafactor": rounded("adafactor", implementation="fused"),
    "rounded sgd": rounded("sgd", momentum=0.9),
    "rounded muon": rounded("muon"),
    "rounded 8 bits": rounded("adamw8bit"),
    "nf4": Case({"quantize": "nf4", "adapter": LORA}, codes=BOTH),
    "int8": Case({"quantize": "int8", "adapter": LORA}),
    "fp8 base": Case({"quantize": "fp8", "adapter": LORA}),
    "prompt": Case({"adapter": {"kind": "prompt"}}, codes=BOTH),
    "p-tuning": Case({"adapter": {"kind": "p-tuning"}}, codes=BOTH),
    "prefix": Case({"adapter": {"kind": "prefix"}}, codes=BOTH),
    "amp-bf16": Case({"precision": "amp-bf16"}, precision="amp-bf16", rel=2e-2),
    "amp-fp16": Case({"precision": "amp-fp16"}, precision="amp-fp16", rel=2e-2, waits=True),
    "fp16-master": Case({"precision": "fp16-master"}, precision="fp16-master", rel=2e-2, waits=True),
}
TOGETHER = [(name, code) for name, case in CASES.items() for code in case.codes]


def recipe(fields: dict[str, Any], code: str, *, precision: str = "bf16", larger: bool = False) -> Recipe:
    """64 tokens a sequence: attention's backward then has one block of keys and adds in a fixed order."""
    base = {
        "model": {"config": LARGER if larger else LLAMA, "implementation": code},
        "batch": {"micro": 4, "seq": 256 if larger else 64},
        "precision": precision,
        "optimizer": {"lr": 1e-3},
        "hardware": {"gpu": "h200"},
    }
    return recipe_from(merge(base, fields))


def losses(step: Step, count: int = 4) -> list[float]:
    """Of steps on one batch, so that they fall."""
    batches = step.random_batches()
    return [step(batches).item() for _ in range(count)]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.mark.parametrize(("name", "code"), [(n, c) for n, c in TOGETHER if not CASES[n].same_as])
def test_a_gpu_trains_as_a_cpu_does(name: str, code: str):
    case = CASES[name]
    chosen = recipe(case.fields, code, precision=case.precision)
    eager = chosen.model_copy(update={"compile": False, "recompute": "none"}) if chosen.compile else chosen
    reference = assemble(eager, CPU)
    step = assemble(chosen, CARD)
    step.model.load_state_dict(reference.model.state_dict())
    found, expected = losses(step), losses(reference)
    assert found == pytest.approx(expected, rel=case.rel)
    assert found[-1] < found[0]


@pytest.mark.parametrize(("name", "code"), [(n, c) for n, c in TOGETHER if CASES[n].same_as is not None])
def test_what_changes_no_result_changes_no_bit(name: str, code: str):
    """Copies and recomputation overlap the computation: a missed wait would change a loss."""
    case = CASES[name]
    assert case.same_as is not None
    plain, changed = (assemble(recipe(fields, code), CARD) for fields in (case.same_as, case.fields))
    changed.model.load_state_dict(plain.model.state_dict())
    assert losses(changed, 8) == losses(plain, 8)
    ours, theirs = changed.state_dict()["model"], plain.state_dict()["model"]
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key].cpu(), theirs[key].cpu())] == []


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.waits])
def test_a_steady_step_never_waits_for_the_gpu(name: str):
    """A wait in each step would leave the GPU idle, and hide every missed wait above."""
    step = assemble(recipe(CASES[name].fields, "native", precision=CASES[name].precision), CARD)
    batches = step.random_batches()
    for _ in range(2):
        step(batches)
    with waits_are_errors():
        step(batches)


@contextmanager
def waits_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_resumed_step_fetches_its_moments_from_the_host():
    """Their device buffers are allocated during a backward, from memory that was in use just before."""
    chosen = recipe(CASES["weights"].fields, "native", larger=True)
    whole = assemble(chosen, CARD)
    batches = whole.random_batches()
    for _ in range(2):
        whole(batches)
    whole.settle()
    saved = [{key: value.clone() for key, value in values.items()} for values in _states(whole)]
    weights = {name: value.clone() for name, value in whole.state_dict()["model"].items()}
    resumed = assemble(chosen, CARD)
    resumed.model.load_state_dict(weights)
    for state, values in zip(_states(resumed), saved, strict=True):
        state.update(values)
    assert [resumed(batches).item() for _ in range(4)] == [whole(batches).item() for _ in range(4)]


def _states(step: Step) -> list[dict[str, torch.Tensor]]:
    """Of each weight, which has an optimizer of its own."""
    return [optimizer.state[optimizer.param_groups[0]["params"][0]] for optimizer in step.optimizers]


# -- memory


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """By the recipe's id, from processes that see no GPU."""
    return swept(tmp_path_factory.mktemp("predicted"), "--predict-only")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """By the recipe's id, each from a new process without segments of others."""
    how = ("--measure-only", "--device", "cuda", "--steps", "0", "--warmup", "2")
    return swept(tmp_path_factory.mktemp("measured"), *how)


def swept(folder: Path, *how: str) -> dict[str, Record]:
    """Return the records that ``trainfit sweep`` makes of every recipe here."""
    chosen = [recipe(CASES[name].fields, code, larger=True) for name, code in TOGETHER]
    recipes, records = folder / "recipes.jsonl", folder / "records.jsonl"
    recipes.write_text("".join(one.model_dump_json() + "\n" for one in chosen))
    program = "import sys; from trainfit.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "sweep", str(recipes), "--out", str(records), *how]
    # Kernels that another process has tuned are not tuned again, and the first step's peak is lower.
    fresh = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    done = subprocess.run(command, capture_output=True, text=True, env=fresh)
    assert done.returncode == 0, done.stdout + done.stderr
    return {record.recipe_id: record for record in read_jsonl(records)}


# The first to ask waits until all are predicted and measured: some seconds each.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "code"), TOGETHER)
def test_the_peak_is_the_predicted_one(
    name: str, code: str, predicted: dict[str, Record], measured: dict[str, Record]
):
    """Of each phase of the first and the steady step, within 1 % (3 % compiled)."""
    chosen = recipe(CASES[name].fields, code, larger=True)
    estimate, measurement = predicted[chosen.id].estimate, measured[chosen.id].measurement
    assert estimate is not None
    assert measurement is not None
    assert measurement.status == "done", measurement.message
    assert measurement.phases is not None
    bound = 0.03 if chosen.compile else 0.01
    assert peaks_mib(measurement.phases) == pytest.approx(peaks_mib(estimate.phases), rel=bound)


def peaks_mib(phases: Phases) -> dict[str, float]:
    """By step and phase."""
    steps = {"first": phases.first, "steady": phases.steady}
    return {
        f"{step} {phase}": getattr(peaks, phase) / MIB for step, peaks in steps.items() for phase in PHASES
    }
