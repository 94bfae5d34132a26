"""``autocast``: the dtype that each operation and each component of a model gets, on the CPU and on CUDA.

Every entry is found by running it: the output's dtype of fp32 inputs, and of inputs in the low precision
already.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainfit.bench.harness.bench import Bench, Point
from trainfit.bench.harness.experiment import Column, Experiment
from trainfit.spec.bench import BenchRow, Cell

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
SIZE = 16

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, torch.ones_like(x)),
    "matmul": lambda x: x @ x,
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "conv1d": lambda x: F.conv1d(x[None], torch.ones(SIZE, SIZE, 1, device=x.device, dtype=x.dtype)),
    "attention (SDPA)": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (SIZE,)),
    "rms_norm": lambda x: F.rms_norm(x, (SIZE,)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(SIZE, dtype=torch.long, device=x.device)),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "exp": torch.exp,
    "pow": lambda x: x.pow(2),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "sum": torch.sum,
    "cumsum": lambda x: x.cumsum(-1),
    "norm": torch.linalg.vector_norm,
    "mean": torch.mean,
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "dropout": F.dropout,
    "add of fp32": lambda x: x + torch.ones(SIZE, device=x.device),
    "cat with fp32": lambda x: torch.cat([x, torch.ones(SIZE, SIZE, device=x.device)]),
}
COMPONENTS = ("weights", "fc1", "relu", "layer norm", "fc2 (logits)", "loss", "gradients")


class ToyModel(nn.Module):
    """Linear, ReLU, LayerNorm, Linear: the model whose dtypes the course tabulates."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield operations and components on the CPU and, where the device is a GPU, on CUDA."""
    for device in dict.fromkeys([torch.device("cpu"), bench.device]):
        for low, dtype in LOW.items():
            for name, operation in OPERATIONS.items():
                point: Point = {"device": device.type, "autocast": low, "operation": name}
                # An operation that the device lacks in this dtype fails, and its row gives the error.
                yield from bench.find(point, partial(operation_dtypes, operation, device, dtype))
            for name in COMPONENTS:
                point = {"device": device.type, "autocast": low, "component": name}
                yield from bench.find(point, partial(_component, name, device, dtype))


def _component(name: str, device: torch.device, low: torch.dtype) -> dict[str, Cell]:
    return {"dtype": component_dtypes(device, low)[name]}


def operation_dtypes(
    operation: Callable[[Tensor], Tensor], device: torch.device, low: torch.dtype
) -> dict[str, Cell]:
    """Return the output's dtype under autocast to ``low``, of fp32 inputs and of inputs in ``low``."""
    x = torch.ones(SIZE, SIZE, device=device)
    with torch.autocast(device.type, dtype=low):
        return {"of_fp32": _name(operation(x).dtype), "of_low": _name(operation(x.to(low)).dtype)}


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
    return {name: _name(tensor.dtype) for name, tensor in zip(COMPONENTS, tensors, strict=True)}


def _name(dtype: torch.dtype) -> str:
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return short.get(dtype, str(dtype))


EXPERIMENT = Experiment(
    title="Which dtype autocast gives",
    question="Which dtype does each operation and model component get under autocast?",
    run=run,
    limit_s=60,
    columns=(
        Column("of_fp32", note="the output's dtype where the inputs are fp32"),
        Column("of_low", note="the output's dtype where the inputs are in autocast's dtype already"),
    ),
)
