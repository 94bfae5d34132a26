"""Small modules whose compiled forward and backward tests trace, and what they keep for the backward."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from trainfit.catalog.load import gpu
from trainfit.ledger.ledger import ALLOCATE, FREE, Ledger
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.gpu import virtual_gpu

CPU = torch.device("cpu")
TOKENS, E, FF = 512, 256, 1024
CUBLAS_WORKSPACE = 32 << 20  # Of one handle, on Hopper


class SwiGlu(nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(E, device=CPU)
        self.gate, self.up = nn.Linear(E, FF, False, CPU), nn.Linear(E, FF, False, CPU)
        self.down = nn.Linear(FF, E, False, CPU)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def on_h200() -> Any:
    return virtual_gpu(GpuTraits.of(gpu("h200")), prefers_cudnn=True)


def step_of(make: Any, shape: tuple[int, ...], *, compiled: bool, trains: bool = True) -> Ledger:
    """Ledger of one forward and backward of a module on x of this shape."""
    with on_h200() as virtual:
        module = make()
        if compiled:
            virtual.compiler(module)
        virtual.model_is_complete(module, [])
        virtual.begin("steady", "data")
        x = torch.empty(shape, device=CPU, requires_grad=trains)
        virtual.begin("steady", "forward")
        y = module(x)
        virtual.begin("steady", "backward")
        if y.requires_grad:
            y.sum().backward()
        return virtual.finish()


def kept(ledger: Ledger) -> dict[int, int]:
    """Bytes of what the forward allocated and left alive, by storage."""
    forward = next(i for i, segment in enumerate(ledger.segments) if segment.phase == "forward")
    alive: dict[int, int] = {}
    for event in ledger.events:
        if event.segment == forward and event.kind == ALLOCATE:
            alive[event.storage] = ledger.storages[event.storage].num_bytes
        elif event.segment == forward and event.kind == FREE:
            alive.pop(event.storage, None)
    return alive


def kept_by_torch(make: Any, shape: tuple[int, ...]) -> int:
    """Return the bytes that a module, partitioned by AOTAutograd, saves for its backward, without inputs."""
    torch._dynamo.reset()
    module, x = make(), torch.randn(shape, requires_grad=True)
    inputs = {t.untyped_storage().data_ptr() for t in (x, *module.parameters())}
    saved: dict[int, int] = {}

    def note(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in inputs:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    module.compile(backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = module(x)
    torch._dynamo.reset()
    del y
    return sum(saved.values())
