"""Weights rounded to fp8 once a step: the losses and updates of rounding in each use, and bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tiny_recipe import TINY_LLAMA
from trainfit.kernels.fp8_cast import op
from trainfit.measurement.run import measure
from trainfit.models import fp8_weights
from trainfit.models.fp8_weights import NAMES, Fp8Linear, Kept, KeptFp8, KeptWeights
from trainfit.prediction.predict import ledger_of, predict
from trainfit.spec.errors import InputError
from trainfit.spec.objective import Preference
from trainfit.spec.recipe import Batch, Hardware, Optimizer, Recipe
from trainfit.step import Step, assemble
from trainfit.techniques import registry
from trial_start import forked
from virtual_runs import recipe_of

CPU = torch.device("cpu")
LLAMA = TINY_LLAMA | {"hidden_size": 64, "intermediate_size": 4112, "num_hidden_layers": 3}
KINDS = ("scales", "codes", "both-layouts")
MICRO_BATCHES = 3
BYTES = {"scales": 0, "codes": 1, "both-layouts": 2}  # A parameter


def recipe(kind: str = "scales", implementation: str = "native", **fields: Any) -> Recipe:
    batch = Batch(micro=2, seq=16, accumulate=MICRO_BATCHES)
    wanted = {"precision": "fp8", "fp8_weights": kind, "batch": batch, **fields}
    return recipe_of(LLAMA, implementation, **wanted)


def step_of(wanted: Recipe) -> Step:
    return assemble(wanted, CPU, compiler=lambda module: module.compile(backend="aot_eager"))


def losses(step: Step, steps: int = 3) -> list[float]:
    return [step(step.random_batches(0)).item() for _ in range(steps)]


def measuring_each_use(step: Step) -> Step:
    """Let a step's layers keep nothing."""
    for module in step.model.modules():
        for name in NAMES:
            if name in module._buffers:
                setattr(module, name, None)
    step._around_forward.clear()
    step._after_step.clear()
    return step


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "fields", [{}, {"block_kernels": "fp8"}, {"compile": "block"}, {"recompute": "full"}], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_of_three_updates_differs_from_rounding_in_each_use(kind: str, fields: dict[str, Any]) -> None:
    kept, each = step_of(recipe(kind, **fields)), measuring_each_use(step_of(recipe("scales", **fields)))
    assert losses(kept) == losses(each)
    for found, expected in zip(kept.model.parameters(), each.model.parameters(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("implementation", ["native", "hf"])
def test_it_trains_as_torchaos_layers_do(implementation: str) -> None:
    kept, plain = (losses(step_of(recipe(kind, implementation))) for kind in ("codes", "each-use"))
    assert kept == pytest.approx(plain, rel=1e-3)
    assert kept[-1] < kept[0]


def test_layers_outside_of_torchaos_choice_stay_bf16() -> None:
    step = step_of(recipe("codes"))
    converted = [name for name, one in step.model.named_modules() if isinstance(one, Fp8Linear)]
    assert converted == [f"layers.{n}.mlp.{part}" for n in range(3) for part in ("up", "down")]


def test_loaded_weights_are_rounded_before_the_next_forward(tmp_path: Path) -> None:
    """Of a step that has run, and whose checkpoint continues bit for bit."""
    first, second = (step_of(recipe("both-layouts")) for _ in range(2))
    expected = losses(first, 4)
    begun = step_of(recipe("both-layouts"))
    losses(begun, 2)
    torch.save(begun.state_dict(), tmp_path / "state")
    assert not [name for name in begun.state_dict()["model"] if name.rpartition(".")[2] in NAMES]
    losses(second, 1)
    second.load_state_dict(torch.load(tmp_path / "state", weights_only=False))
    assert losses(second, 2) == expected[2:]


def test_evaluation_reads_the_last_updates_weights() -> None:
    step = step_of(recipe("codes"))
    batch = step.random_batches(1)[0]
    losses(step, 1)
    found = step.cross_entropy(batch).item()
    module = next(one for one in step.model.modules() if isinstance(one, Fp8Linear))
    codes, _ = Kept().for_forward(module.weight.detach())
    assert torch.equal(codes.view(torch.uint8), module.fp8_codes.view(torch.uint8))  # pyright: ignore
    with torch.no_grad():
        module.weight.zero_()
    assert step.cross_entropy(batch).item() != found


@pytest.mark.parametrize("kind", KINDS)
def test_predicted_and_measured_bytes_are_equal(kind: str) -> None:
    on_cpu = recipe(kind, hardware=Hardware(gpu="cpu"))
    predicted, measured = predict(on_cpu), measure(on_cpu, steps=0, device="cpu", start=forked)
    assert measured.status == "done", measured.message
    assert predicted.phases == measured.phases


@pytest.mark.parametrize("compiled", [False, "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_ledger_has_one_cast_a_weight_and_step(kind: str, compiled: Any) -> None:
    """All layers' of a model of which a few are traced; and the bytes of what is kept."""
    config = LLAMA | {"num_hidden_layers": 8}
    fields = {"compile": compiled, "block_kernels": "fp8", "hardware": Hardware(gpu="h100-sxm")}
    batch = Batch(micro=2, seq=64, accumulate=MICRO_BATCHES)
    recipes = [
        recipe(one, batch=batch, **fields).model_copy(update={"model": model_of(config)})
        for one in (kind, "each-use")
    ]
    kept = ledger_of(recipes[0])

    def calls(name: str) -> int:
        return sum(kept.times(op) * op.calls for op in kept.steady_ops if op.name.startswith(name))

    num_weights, numel = 8 * 2, 64 * 3 * 4112
    num_gradients = 0 if compiled else MICRO_BATCHES * 8  # Of the blocks' outputs, measured before a cast
    assert calls("aten.linalg_vector_norm") == num_weights + num_gradients
    assert calls("trainfit.fp8_cast_.") == (0 if kind == "scales" else num_weights)
    for cast in (one for one in kept.steady_ops if one.name.startswith("trainfit.fp8_cast_.")):
        of_weight = cast.num_bytes // (2 + BYTES[kind]) // 64 * 64
        assert of_weight in (64 * 4112, 64 * 2 * 4112)  # Read in bf16, written in each layout, and two scales
    assert calls("trainfit.transpose_codes") == (MICRO_BATCHES * num_weights if kind == "codes" else 0)
    sizes = [predict(one).breakdown.weights for one in recipes]
    # A scale or magnitude is a block of 512 bytes.
    assert sizes[0] - sizes[1] == 8 * numel * BYTES[kind] + num_weights * 512


def model_of(config: dict[str, Any]) -> Any:
    return recipe_of(config, "native").model


def test_the_reference_writes_both_layouts_and_hides_no_nan() -> None:
    torch.manual_seed(0)
    x = torch.randn(130, 96).bfloat16()
    x[3, 5] = float("nan")
    assert op.magnitude(x).isnan()
    codes, turned = (torch.empty(size, dtype=op.E4M3) for size in ((130, 96), (96, 130)))
    scale = torch.ones(1)
    op.reference_cast(x, op.magnitude(x), codes, turned, scale)
    assert codes.float().isnan().all()
    x[3, 5] = 0
    op.reference_cast(x, op.magnitude(x), codes, turned, scale)
    assert torch.equal(turned.float(), codes.float().t())
    assert float((codes.double() * scale - x.double()).norm() / x.double().norm()) < 0.03
    assert fp8_weights.largest(x, op.E4M3)[1] == scale


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bf16": ({"precision": "bf16"}, "rounds no weights"),
    "several GPUs": ({"hardware": Hardware(count=2)}, "several GPUs"),
    "in the backward": ({"optimizer": Optimizer(in_backward=True), "batch": Batch(micro=2, seq=16)},
                        "before the step ends"),
    "preferences": ({"objective": Preference(name="dpo")}, "other weights"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses(case: str) -> None:
    fields, words = REFUSED[case]
    with pytest.raises(InputError, match=words):
        registry.check(recipe(**fields))


def test_a_model_without_products_in_fp8_is_refused() -> None:
    small = recipe("codes").model_copy(update={"model": model_of(LLAMA | {"intermediate_size": 512})})
    with pytest.raises(InputError, match="no layer of the decoder blocks multiplies in fp8"):
        assemble(small, CPU)


class Allocations(TorchDispatchMode):
    """Sizes of the tensors that are allocated while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(out, torch.Tensor):
            self.sizes.append(out.nbytes)
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_allocated_but_what_is_kept(kind: KeptFp8) -> None:
    """Memory freed between two layers would change the order of the allocator's segments."""
    layers = [torch.nn.Linear(16, outputs, bias=False) for outputs in (32, 48)]
    with Allocations() as seen:
        KeptWeights(layers, kind)
    kept = [buffer.nbytes for layer in layers for buffer in layer.buffers()]
    assert sorted(seen.sizes) == sorted(kept)
    assert len(kept) == 2 * {"scales": 1, "codes": 2, "both-layouts": 3}[kind]
