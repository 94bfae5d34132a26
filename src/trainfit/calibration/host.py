"""Costs of the host: Python, PyTorch's dispatcher, autograd, modules, optimizers; and whole small steps.

The single costs use CPU tensors of a few elements, so that any machine measures them alike. With a GPU its
launches are timed too, its queue kept short, and steps so small that the GPU waits for the host.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from trainfit.calibration.workloads import tiny_config, with_layers
from trainfit.spec.calibration import HostStep
from trainfit.spec.parsing.recipe_file import recipe_from

CALLS, REPEATS = 200, 15
"""Calls in a sample, few enough for a GPU's queue; the median of the samples counts."""
STEPS, WARMUP = 8, 3


def costs(device: torch.device, *, compiled: bool = True) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield each single cost's name and what measures it, in seconds a call.

    Args:
        compiled: with those of compiled calls, which take most of the time.
    """
    torch.set_num_threads(1)
    x, w = torch.randn(16), torch.randn(16, requires_grad=True)
    yield "python call", lambda: seconds(_python_calls) / 100
    yield "module call", lambda: seconds(_calls(nn.Identity(), x))
    yield "view", lambda: seconds(lambda: x.view(4, 4))
    yield "operation", lambda: seconds(lambda: torch.mul(x, x))
    yield "operation with autograd", lambda: seconds(lambda: torch.mul(w, x))
    yield "backward of an operation", lambda: _backward(w)
    yield "linear module", lambda: seconds(_calls(nn.Linear(16, 16), x[None]))
    yield "checkpointed call", lambda: _checkpointed(w)
    if compiled:
        yield "compiled call", lambda: _compiled(x)
    yield "AdamW a parameter, one by one", lambda: _optimizer("AdamW", foreach=False)
    yield "AdamW a parameter, foreach", lambda: _optimizer("AdamW", foreach=True)
    yield "Adafactor a parameter", lambda: _optimizer("Adafactor", foreach=False)
    if device.type == "cuda":
        y, v = x.to(device), w.detach().to(device).requires_grad_()
        a = torch.randn(16, 16, device=device, dtype=torch.bfloat16)
        yield "launch of an operation", lambda: seconds(lambda: torch.mul(y, y), device)
        yield "launch of an operation with autograd", lambda: seconds(lambda: torch.mul(v, y), device)
        yield "launch of a product", lambda: seconds(lambda: torch.mm(a, a), device)
        yield "launch of a backward", lambda: _backward(v, device)
        if compiled:
            yield "launch of a compiled call", lambda: _compiled(y, device)


def seconds(call: Callable[[], object], device: torch.device | None = None) -> float:
    """Return the median seconds of a call on the host; the device's queue is emptied between samples."""
    found: list[float] = []
    for _ in range(REPEATS):
        if device is not None:
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - begun) / CALLS)
    return statistics.median(found[1:])


def _calls(module: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    return lambda: module(x)


def _python_calls() -> int:
    def add(a: int, b: int) -> int:
        return a + b

    total = 0
    for number in range(100):
        total = add(total, number)
    return total


def _backward(w: torch.Tensor, device: torch.device | None = None) -> float:
    """Return the seconds of one node of the backward of a chain of products."""
    found: list[float] = []
    for _ in range(REPEATS):
        y = w
        for _ in range(CALLS):
            y = y * 1.0
        loss = y.sum()
        if device is not None:
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        loss.backward()
        found.append((time.perf_counter() - begun) / CALLS)
    return statistics.median(found[1:])


def _checkpointed(w: torch.Tensor) -> float:
    """Return what checkpointing adds to forward and backward of a function."""
    from torch.utils.checkpoint import checkpoint

    def plain() -> None:
        (w * 2.0).sum().backward()

    def checkpointed() -> None:
        found: Any = checkpoint(lambda x: x * 2.0, w, use_reentrant=False)
        found.sum().backward()

    return max(0.0, seconds(checkpointed) - seconds(plain))


def _compiled(x: torch.Tensor, device: torch.device | None = None) -> float:
    """Return the seconds of one call of a compiled function: its guards and its program's start."""
    compiled = torch.compile(lambda t: t * 2.0, backend="aot_eager" if device is None else "inductor")
    compiled(x)
    return seconds(lambda: compiled(x), device)


def _optimizer(name: str, **options: Any) -> float:
    parameters = [nn.Parameter(torch.randn(16, 4)) for _ in range(20)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = getattr(torch.optim, name)(parameters, lr=1e-4, **options)
    optimizer.step()
    found = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        optimizer.step()
        found.append((time.perf_counter() - begun) / len(parameters))
    return statistics.median(found[1:])


# -- steps that wait for the host --


def small_steps() -> Iterator[dict[str, Any]]:
    """Yield recipes of few tokens and narrow layers, each with another kind of host work.

    Many short ones: a step varies more from one ten seconds to the next than within them (docs/log.md).
    """
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    small |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    llama = tiny_config()
    gpt2 = with_layers(
        "gpt2", 4, n_embd=64, n_head=4, vocab_size=512, n_positions=128, bos_token_id=None, eos_token_id=None
    )
    gemma = with_layers("gemma-2b", 4, intermediate_size=128, head_dim=16, **small)
    olmoe = with_layers("olmoe-1b-7b", 2, intermediate_size=64, num_experts=16, **small)
    foreach, forloop = {"implementation": "foreach"}, {"implementation": "forloop"}
    table: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (llama, {}),
        (gpt2, {}),
        (llama, {"precision": "amp-bf16"}),
        (gpt2, {"recompute": "full", "precision": "amp-bf16"}),
        (llama, {"optimizer": forloop}),
        (gemma, {}),
        (olmoe, {}),
        (llama, {"adapter": {"kind": "lora"}}),
        (llama, {"optimizer": foreach}),
        (llama, {"optimizer": {"name": "adafactor"}}),
        (llama, {"optimizer": {"name": "sgd", **foreach}}),
        (llama, {"recompute": "selective"}),
        (llama, {"precision": "amp-fp16", "optimizer": foreach}),
        (llama, {"attention": "eager"}),
        (llama, {"recompute": "full"}),
        (olmoe, {"recompute": "full", "optimizer": foreach}),
        (llama, {"compile": "block"}),
        (gpt2, {"compile": "block"}),
        (llama, {"compile": "block", "recompute": "full"}),
        (llama, {"compile": "model"}),
    ]
    for config, rest in table:
        model = {"config": config, "name": f"small {config['model_type']}"}
        yield {"model": model, "batch": {"micro": 1, "seq": 32}, **rest}


def quick_steps() -> Iterator[dict[str, Any]]:
    """Yield those of ``calibrate --host``: eager ones that load no code beyond the first one's.

    Another architecture, an adapter and fp16 take 2 s each before their first step. In nine of eleven
    calibrations the median ratio of these nine was within 3.4 % of that of all 16; in the others, one of a
    busy host, it was 6 and 11 % below.
    """
    for data in small_steps():
        is_plain = data["model"]["config"]["model_type"] == "llama" and "adapter" not in data
        if is_plain and not data.get("compile") and data.get("precision") != "amp-fp16":
            yield data


def host_step(data: dict[str, Any], device: torch.device) -> HostStep:
    """Return the medians of a step's phases as the host issues them, and of steps one after another."""
    from trainfit.step import assemble

    step = assemble(recipe_from(data), device)
    batches = step.random_batches()
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    phases: dict[str, list[float]] = {}
    for number in range(WARMUP + STEPS):
        wait()
        marks: list[tuple[str, float]] = []
        step(batches, on_phase=lambda name, m=marks: m.append((name, time.perf_counter())))
        marks.append(("", time.perf_counter()))
        if number >= WARMUP:
            for (name, begun), (_, ended) in itertools.pairwise(marks):
                phases.setdefault(name, []).append(ended - begun)
    wait()
    begun = time.perf_counter()
    for _ in range(STEPS):
        step(batches)
    wait()
    whole_s = (time.perf_counter() - begun) / STEPS
    return HostStep(
        recipe=data, issue_s={name: statistics.median(values) for name, values in phases.items()},
        step_s=whole_s,
    )  # fmt: skip
