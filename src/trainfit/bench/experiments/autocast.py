"""``autocast``: the dtype that each operation and each component of a model gets, on the CPU and on CUDA.

Every entry is found by running it, for inputs in fp32, in the low precision, and mixed. The operations are
those of PyTorch's published list and others that models use (bench/workloads/autocast_list.py). Rows of the
virtual GPU are what trainfit predicts of CUDA; no GPU is needed for them.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from trainfit.bench.harness.bench import Bench, Point
from trainfit.bench.harness.experiment import Column, Experiment
from trainfit.bench.workloads.autocast_list import (
    OPERATIONS,
    SIZE,
    Operation,
    dtypes,
    name_of,
    published_dtypes,
)
from trainfit.spec.bench import BenchRow, Cell
from trainfit.virtual.cuda.ops import cuda_ops

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
CPU = torch.device("cpu")
VIRTUAL = "virtual GPU"
CAPABILITY = (9, 0)
COMPONENTS = ("weights", "fc1", "relu", "layer norm", "fc2 (logits)", "loss", "gradients")


class ToyModel(nn.Module):
    """Linear, ReLU, LayerNorm, Linear: the model whose dtypes the course tabulates."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield operations on the CPU, the virtual GPU and, where the device is one, CUDA; then components."""
    for low, dtype in LOW.items():
        for name, operation in OPERATIONS.items():
            for device in dict.fromkeys(("cpu", VIRTUAL, bench.device.type)):
                point: Point = {"operation": name, "autocast": low, "device": device}
                yield from bench.find(point, partial(operation_dtypes, operation, device, dtype))
    for low, dtype in LOW.items():
        for device in dict.fromkeys([CPU, bench.device]):
            for name in COMPONENTS:
                point = {"device": device.type, "autocast": low, "component": name}
                yield from bench.find(point, partial(_component, name, device, dtype))


def operation_dtypes(operation: Operation, device: str, low: torch.dtype) -> dict[str, Cell]:
    """Return the dtypes on one device; of CUDA also whether the list and the virtual GPU have the same."""
    if device == "cpu":
        return {**dtypes(operation, CPU, low)}
    predicted = predicted_dtypes(operation, low)
    found = predicted if device == VIRTUAL else dtypes(operation, torch.device(device), low)
    numbers: dict[str, Cell] = {"published": operation.published, **found}
    if published := published_dtypes(operation, low):
        numbers["as_published"] = found == published
    if device != VIRTUAL:
        numbers["as_predicted"] = found == predicted
    return numbers


def predicted_dtypes(operation: Operation, low: torch.dtype) -> dict[str, str]:
    """Return the dtypes on the virtual GPU, whose tensors are fake CPU tensors."""
    with cuda_ops(CAPABILITY, True), FakeTensorMode():
        return dtypes(operation, CPU, low)


def _component(name: str, device: torch.device, low: torch.dtype) -> dict[str, Cell]:
    return {"dtype": component_dtypes(device, low)[name]}


def component_dtypes(device: torch.device, low: torch.dtype) -> dict[str, str]:
    """Return the dtype of each component of the toy model, forward under autocast and backward outside it."""
    model = ToyModel().to(device)
    x, target = torch.randn(4, SIZE, device=device), torch.zeros(4, dtype=torch.long, device=device)
    with torch.autocast(device.type, dtype=low):
        first = model.fc1(x)
        active = torch.relu(first)
        normed = model.norm(active)
        logits = model.fc2(normed)
        loss = F.cross_entropy(logits, target)
        weights = model.fc1.weight
    loss.backward()
    gradient = model.fc1.weight.grad
    assert gradient is not None
    tensors = (weights, first, active, normed, logits, loss, gradient)
    return {name: name_of(tensor.dtype) for name, tensor in zip(COMPONENTS, tensors, strict=True)}


EXPERIMENT = Experiment(
    title="Which dtype autocast gives",
    question="Which dtype does each operation and model component get under autocast?",
    run=run,
    limit_s=60,
    columns=(
        Column("published", note="in PyTorch's list: low is autocast's dtype, widest that of the operands"),
        Column("of_fp32", note="the output's dtype where the inputs are fp32; error: PyTorch refuses it"),
        Column("of_low", note="the output's dtype where the inputs are in autocast's dtype already"),
        Column(
            "of_mixed", note="the output's dtype where the first input is in autocast's dtype, others in fp32"
        ),
        Column("as_published", note="whether the list says so too"),
        Column("as_predicted", note="whether the virtual GPU has the same dtypes"),
    ),
)
