"""Draft: a training step under construction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainfit.catalog.names import CPU

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from trainfit.kernels.preference_loss.op import PairLosses
    from trainfit.offload.blocks import HostBlocks
    from trainfit.offload.optimizer_state import HostMoments
    from trainfit.parallel.cluster import Cluster
    from trainfit.parallel.context_parallel import SequenceShards
    from trainfit.parallel.reference import Reference
    from trainfit.spec.pipeline import Stage
    from trainfit.spec.recipe import Recipe

Compiler = Callable[..., None]  # (module, **settings of torch.compile): compiles the module in place
LossFunction = Callable[["nn.Module", "dict[str, torch.Tensor]"], "torch.Tensor"]
"""(model, micro-batch) -> mean next-token loss, fp32 scalar."""
Forward = Callable[["dict[str, torch.Tensor]"], "torch.Tensor"]  # (micro-batch) -> training loss, fp32 scalar
ContextFactory = Callable[[], AbstractContextManager[object]]
"""Makes a fresh context manager; a step enters one each time."""


def weight_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype in which the model is built."""
    import torch

    if recipe.weight_bytes == 4:
        return torch.float32
    return torch.float16 if recipe.precision.startswith("fp16") else torch.bfloat16


def _real_cluster() -> Cluster:
    from trainfit.parallel.cluster import REAL

    return REAL


@dataclass
class Draft:
    """A step under construction: techniques change its fields between building the model and assembling."""

    model: nn.Module
    device: torch.device
    compiler: Compiler
    hosted: HostBlocks | None = None
    """The decoder blocks whose weights are on the host; None: all weights are on the device."""
    around_forward: list[ContextFactory] = field(default_factory=list)
    """Entered around every forward, the first outermost."""
    around_backward: list[ContextFactory] = field(default_factory=list)
    """Entered around every backward, where recomputation runs forward code again."""
    make_optimizer: Callable[[list[Any]], torch.optim.Optimizer] | None = None
    """Takes parameters, or groups of them as mappings."""
    kinds: Callable[[list[nn.Parameter]], list[list[nn.Parameter]]] = lambda parameters: [parameters]
    """Splits parameters into the groups for which ``make_optimizer`` is called separately."""
    groups: Callable[[list[nn.Parameter]], list[Any]] = lambda parameters: parameters
    """Splits the parameters of one optimizer into groups with settings of their own."""
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    host_state: HostMoments | None = None
    """The optimizers' state that is on the host between updates; None: it stays on the device."""
    steps_in_backward: bool = False  # The optimizers run in backward hooks; the step does not call them
    loss: LossFunction | None = None  # None: the model's own
    cross_entropy: LossFunction | None = None
    """The loss without label smoothing and z-loss, where ``loss`` has them."""
    token_logs: LossFunction | None = None
    """(model, micro-batch) -> log-probability of each next token, fp32 [b, s], without a gradient; of pairs
    of answers that of each answer, [b]."""
    pair_losses: Callable[[torch.Tensor, dict[str, torch.Tensor]], PairLosses] | None = None
    """(log-probability of each answer, micro-batch with the reference's) -> the losses of its pairs."""
    reference: Reference | None = None  # What turns the model into the one that ``token_logs`` compares with
    batch_tensors: Callable[[torch.Tensor], dict[str, torch.Tensor]] | None = None
    """(ids [b, s]) -> what a random micro-batch holds besides, where the loss needs more than labels."""
    body: nn.Module | None = None  # The part of the model that loss calls; None: all of it
    after_backward: list[Callable[[], None]] = field(default_factory=list)
    """Called when a step's last backward is done, while gradients are still scaled."""
    before_update: list[Callable[[], None]] = field(default_factory=list)
    """Called when all gradients are complete (unscaled), before the optimizers."""
    after_step: list[Callable[[], None]] = field(default_factory=list)
    """Called after each update, when gradients are freed."""
    readings: dict[str, torch.Tensor] = field(default_factory=dict)
    """Values measured in the last update: fp32 on the device, []; ``policy_sums`` [accumulate, 4],
    ``pair_means`` [accumulate, 3]."""
    carried: dict[str, torch.Tensor] = field(default_factory=dict)
    """What techniques carry from step to step besides, by name; checkpoints of one rank hold it."""
    scaler: torch.amp.GradScaler | None = None  # pyright: ignore[reportAttributeAccessIssue]
    num_micro_batches: int = 1
    packs_documents: bool = False  # Batches have position ids that begin anew with each document
    mesh: DeviceMesh | None = None  # The ranks, with the dimensions of recipe.mesh; None: one rank
    cluster: Cluster = field(default_factory=_real_cluster)
    """Operations between the ranks other than collectives."""
    sequences: SequenceShards | None = None  # The ranks that share sequences; None: each has whole ones
    stage: Stage | None = None  # The pipeline stage that ``model`` is; None: the whole model
    before_batch: list[Callable[[bool], None]] = field(default_factory=list)
    """Called before each micro-batch; the argument is True for the last of a step."""
    outermost: nn.Module | None = None
    """The outermost module that FSDP2 wraps; None: the model."""
    wrapped: Forward | None = None
    """The training forward through a data-parallel wrapper; None: model and loss are called directly."""

    def runs_on_cpu(self, recipe: Recipe) -> bool:
        """True if the step runs, or is predicted to run, on a CPU; a virtual GPU has fake CPU tensors."""
        from torch._guards import active_fake_mode

        is_virtual = active_fake_mode() is not None
        return self.device.type == "cpu" and (not is_virtual or recipe.hardware.gpu == CPU)

    def trainable(self) -> list[nn.Parameter]:
        """Return the trainable parameters, each once (tied ones too), in the model's order."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def trainable_by_block(self) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
        """Return the trainable parameters of each decoder block that has any, and all others."""
        from trainfit.models.layers import decoder_blocks

        groups = [[p for p in block.parameters() if p.requires_grad] for block in decoder_blocks(self.model)]
        inside = {id(parameter) for group in groups for parameter in group}
        return [group for group in groups if group], [p for p in self.trainable() if id(p) not in inside]

    def optimizers_for(self, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        """Return new optimizers that update these parameters, each once."""
        assert self.make_optimizer is not None, "a technique that covers optimizer.name sets make_optimizer"
        return [self.make_optimizer(self.groups(part)) for part in self.kinds(parameters) if part]


def in_groups(parameters: list[Any]) -> list[nn.Parameter]:
    """Return the parameters of an optimizer's argument, which may be groups of them."""
    return [
        parameter for one in parameters for parameter in (one["params"] if isinstance(one, dict) else (one,))
    ]
