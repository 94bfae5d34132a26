"""Kernels of compiled code: seconds by the profiler, bytes from the ledger of the same recipe."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from trainfit.calibration.workloads import Row, with_layers
from trainfit.ledger.ledger import Ledger
from trainfit.prediction.predict import ledger_of
from trainfit.spec.calibration import OpTime
from trainfit.spec.recipe import Recipe

NUM_LAYERS = 3


RECIPES: tuple[Row, ...] = (
    ("llama-3.2-1b", 4, 2048, {"compile": "model"}),
    ("gpt2", 8, 1024, {"compile": "model", "precision": "amp-bf16"}),
    ("llama-3.1-8b", 2, 4096, {"precision": "fp8"}),
)
"""Those that every calibration measures; compiled by block unless stated."""
MORE: tuple[Row, ...] = (
    ("phi-2", 4, 1024, {"precision": "amp-bf16", "attention": "eager"}),
    ("gemma-2b", 2, 2048, {}),
    ("gpt2", 8, 1024, {"precision": "amp-bf16"}),
    ("llama-3.2-1b", 4, 2048, {"recompute": "full"}),
    ("pythia-1.4b", 4, 2048, {}),
    ("qwen2.5-0.5b", 4, 1024, {"compile": "model", "precision": "amp-bf16"}),
    ("opt-1.3b", 4, 1024, {"precision": "fp32"}),
    ("mistral-7b-v0.1", 2, 4096, {"adapter": {"kind": "lora"}}),
    ("phi-3-mini-4k", 4, 1024, {"precision": "fp8", "attention": "eager"}),
    ("gemma-3-1b", 8, 1024, {"compile": "model"}),
    ("qwen3-0.6b", 4, 1024, {"precision": "amp-fp16"}),
    ("llama-3.2-1b", 16, 2048, {}),
    ("olmoe-1b-7b", 4, 1024, {}),
)
"""Those that a calibration with a longer limit measures as well."""


def compiled_recipes(*, more: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield recipes whose blocks or whole models are compiled; ``more``: those of long calibrations."""
    for name, micro, seq, rest in MORE if more else RECIPES:
        model = {"config": with_layers(name, NUM_LAYERS), "name": f"{name}, {NUM_LAYERS} layers"}
        label = ", ".join((name, *(f"{key} {value}" for key, value in rest.items())))
        yield label, {"model": model, "batch": {"micro": micro, "seq": seq}, "compile": "block", **rest}


def kernel_seconds(recipe: Recipe, device: torch.device) -> dict[str, tuple[int, float]]:
    """Return launches and mean seconds of each kernel of the third step, by name."""
    from trainfit.bench.harness.profiling import profiler
    from trainfit.step import assemble

    torch._dynamo.reset()
    step = assemble(recipe, device)
    for _ in range(3):
        step(step.random_batches())
    with profiler(device) as seen:
        step(step.random_batches())
        torch.cuda.synchronize(device)
    found: dict[str, list[float]] = defaultdict(list)
    for event in seen.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            found[event.name].append(event.device_time / 1e6)
    return {name: (len(times), sum(times) / len(times)) for name, times in found.items()}


def compiled_rows(recipe: Recipe, device: torch.device) -> list[OpTime]:
    """Return the Triton kernels of a recipe that the ledger knows by the same name."""
    ledger = ledger_of(recipe, use_cache=False)
    return rows_of(ledger, kernel_seconds(recipe, device))


def rows_of(ledger: Ledger, kernels: dict[str, tuple[int, float]]) -> list[OpTime]:
    """Join the ledger's kernels of compiled code with their measured seconds."""
    known = {op.name: op for op in ledger.steady_ops if op.name.startswith("triton_") and op.num_bytes}
    return [
        OpTime(name, op.dtype, "", (), "", 0, 0, False, 0.0, op.num_bytes, kernels[name][1], "compiled")
        for name, op in known.items()
        if name in kernels
    ]
