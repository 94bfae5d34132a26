"""Draft: a training step being put together; each technique changes its part of it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainfit.catalog.this_cpu import CPU

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainfit.offload.blocks import HostBlocks
    from trainfit.spec.recipe import Recipe

Compiler = Callable[["nn.Module"], None]
"""Compiles a module in place."""
LossFunction = Callable[["nn.Module", "dict[str, torch.Tensor]"], "torch.Tensor"]
"""(model, micro-batch) -> mean next-token loss, fp32 scalar."""
ContextFactory = Callable[[], AbstractContextManager[object]]
"""Makes a fresh context manager; a step enters one each time."""


@dataclass
class Draft:
    """What techniques change on the way from a built model to a step."""

    model: nn.Module
    device: torch.device
    compiler: Compiler
    hosted: HostBlocks | None = None
    """Where the decoder blocks' weights are; None: on the device."""
    around_forward: list[ContextFactory] = field(default_factory=list)
    """Entered around every forward, first in the list outermost."""
    around_backward: list[ContextFactory] = field(default_factory=list)
    """Entered around every backward, where recomputation runs forward code again."""
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    kinds: Callable[[list[nn.Parameter]], list[list[nn.Parameter]]] = lambda parameters: [parameters]
    """Parts of a list of parameters that ``make_optimizer`` is called with one by one, where it makes several kinds."""
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    steps_in_backward: bool = False
    """The optimizers run in hooks while backward runs; the step does not call them."""
    loss: LossFunction | None = None
    """Takes the model and a micro-batch and gives the loss; None: the model's own."""
    cross_entropy: LossFunction | None = None
    """The same without label smoothing and z-loss, where ``loss`` has them."""
    body: nn.Module | None = None
    """What ``loss`` calls of the model, where that is not all of it."""
    before_update: list[Callable[[], None]] = field(default_factory=list)
    """Called when all gradients are there (unscaled), before the optimizers."""
    after_step: list[Callable[[], None]] = field(default_factory=list)
    """Called after each update, gradients gone."""
    readings: dict[str, torch.Tensor] = field(default_factory=dict)
    """What techniques measured in the last update, by name ([] fp32, on the device)."""
    scaler: torch.amp.GradScaler | None = None  # pyright: ignore[reportAttributeAccessIssue]
    num_micro_batches: int = 1

    def runs_on_cpu(self, recipe: Recipe) -> bool:
        """Whether the step runs on a CPU: a real one, or the one a prediction is for (a virtual GPU's tensors are CPU fakes)."""
        from torch._subclasses.fake_tensor import FakeTensor

        if self.device.type != "cpu":
            return False
        is_virtual = isinstance(next(self.model.parameters()), FakeTensor)
        return not is_virtual or recipe.hardware.gpu == CPU

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that train, each once (tied ones too), in the model's order."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def trainable_by_block(self) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
        """The trainable parameters of each decoder block that has some, first to last, and all others."""
        from trainfit.models.layers import decoder_blocks

        blocks = decoder_blocks(self.model)
        groups = [[p for p in block.parameters() if p.requires_grad] for block in blocks]
        inside = {id(parameter) for group in groups for parameter in group}
        return [group for group in groups if group], [p for p in self.trainable() if id(p) not in inside]

    def optimizers_for(self, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        """New optimizers that update these parameters, each once."""
        assert self.make_optimizer is not None, "every optimizer that COVERS lists must set make_optimizer"
        return [self.make_optimizer(part) for part in self.kinds(parameters) if part]
