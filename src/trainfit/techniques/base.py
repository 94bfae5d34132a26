"""Technique, the declaration of one change to a training step, and Draft, the step under construction.

Imports no torch, so that a recipe can be refused early.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainfit.catalog.this_cpu import CPU

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainfit.offload.blocks import HostBlocks
    from trainfit.spec.recipe import Recipe

Data = dict[str, Any]
"""Fields of a recipe as plain data."""
Compiler = Callable[["nn.Module"], None]
"""Compiles a module in place."""
LossFunction = Callable[["nn.Module", "dict[str, torch.Tensor]"], "torch.Tensor"]
"""(model, micro-batch) -> mean next-token loss, fp32 scalar."""
ContextFactory = Callable[[], AbstractContextManager[object]]
"""Makes a fresh context manager; a step enters one each time."""


@dataclass(frozen=True)
class Draw:
    """How random generators of recipes sample a technique."""

    alone: Callable[[random.Random, Data], Data] | None = None
    """(generator, recipe so far) -> fields that turn the technique on, in one of its variants."""
    weights: dict[str, dict[Any, int]] = field(default_factory=dict)
    """Field -> value -> its weight in recipes whose fields are all drawn."""
    share: float | None = None
    """Probability that the fields of ``weights`` leave their default; None: they are always drawn."""
    options: Callable[[random.Random], Data] | None = None
    """Further keys next to a drawn value, such as an optimizer's implementation."""


@dataclass(frozen=True)
class Technique:
    """One change to a plain training step. A module of this package declares it as ``TECHNIQUE``."""

    name: str
    """As in records and pages."""
    order: int
    """Techniques are applied by ascending order."""
    title: str
    """As in tables, and as the heading of its paragraph in docs/reference/techniques.md."""
    fields: tuple[str, ...]
    """Dotted recipe fields that turn it on. With these at their defaults a recipe is its control."""
    apply: Callable[[Recipe, Draft], None] = lambda recipe, draft: None
    """Changes the draft. Torch is imported inside."""
    covers: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Dotted field -> the values that this technique implements."""
    when: Callable[[Recipe], bool] | None = None
    """Whether it applies, where that is not the same as a recipe with the values of ``covers``."""
    check: Callable[[Recipe], None] = lambda recipe: None
    """Raises InputError for what cannot be combined with it."""
    check_device: Callable[[Recipe, str], None] = lambda recipe, device_type: None
    """Raises InputError where a real device ("cuda", "cpu") lacks something. The virtual GPU does not call it."""
    describe: Callable[[Recipe], str] = lambda recipe: ""
    """A few words for tables of recipes; empty where there is nothing to say."""
    examples: tuple[Data, ...] = ()
    """Fields that turn it on, together with ``needs``."""
    variants: tuple[Data, ...] = ()
    """Further fields that turn it on, which no record of results measures."""
    needs: Data = field(default_factory=dict)
    """Fields that the examples, and their control, require."""
    draw: Draw = Draw()
    build: Callable[..., tuple[nn.Module, HostBlocks]] | None = None
    """Builds the model instead of ``step.assemble``: (recipe, dtype, device, on_model) -> model, hosted blocks."""
    label_blocks: Callable[[Recipe, nn.Module], None] = lambda recipe, model: None
    """Labels blocks that differ, before a traced model is shortened."""
    min_repeated: Callable[[Recipe], int] = lambda recipe: 1
    """The least number of equal layers that must be traced together."""
    trace_whole: Callable[[Recipe], bool] = lambda recipe: False
    """Whether every layer must be traced, because equal layers do not act alike."""

    def requested(self, recipe: Recipe) -> bool:
        """Whether the recipe has a value that this technique covers, in each of its fields."""
        return bool(self.covers) and all(value_at(recipe, at) in values for at, values in self.covers.items())

    def applies(self, recipe: Recipe) -> bool:
        """Whether the technique changes this recipe's step."""
        return self.requested(recipe) if self.when is None else self.when(recipe)


def value_at(recipe: Recipe, dotted: str) -> Any:
    """Return the value of a dotted field; of a mapping such as ``{every: 2}`` its key, ``every``."""
    value: Any = recipe
    for part in dotted.split("."):
        value = getattr(value, part, None)
    if hasattr(value, "model_dump"):
        return next(iter(value.model_dump()))
    return value


def weight_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype in which the model is built."""
    import torch

    return torch.bfloat16 if recipe.precision in ("bf16", "fp8") else torch.float32


@dataclass
class Draft:
    """A step under construction: what techniques change between the built model and the step."""

    model: nn.Module
    device: torch.device
    compiler: Compiler
    hosted: HostBlocks | None = None
    """The decoder blocks whose weights are on the host; None: all weights are on the device."""
    around_forward: list[ContextFactory] = field(default_factory=list)
    """Entered around every forward, the first outermost."""
    around_backward: list[ContextFactory] = field(default_factory=list)
    """Entered around every backward, where recomputation runs forward code again."""
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    kinds: Callable[[list[nn.Parameter]], list[list[nn.Parameter]]] = lambda parameters: [parameters]
    """Splits parameters into the groups for which ``make_optimizer`` is called separately."""
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    steps_in_backward: bool = False
    """The optimizers run in backward hooks; the step does not call them."""
    loss: LossFunction | None = None
    """None: the model's own."""
    cross_entropy: LossFunction | None = None
    """The loss without label smoothing and z-loss, where ``loss`` has them."""
    body: nn.Module | None = None
    """The part of the model that ``loss`` calls; None: all of it."""
    before_update: list[Callable[[], None]] = field(default_factory=list)
    """Called when all gradients are complete (unscaled), before the optimizers."""
    after_step: list[Callable[[], None]] = field(default_factory=list)
    """Called after each update, when gradients are freed."""
    readings: dict[str, torch.Tensor] = field(default_factory=dict)
    """Values measured in the last update, by name ([] fp32, on the device)."""
    scaler: torch.amp.GradScaler | None = None  # pyright: ignore[reportAttributeAccessIssue]
    num_micro_batches: int = 1

    def runs_on_cpu(self, recipe: Recipe) -> bool:
        """Whether the step runs, or is predicted to run, on a CPU. A virtual GPU's tensors are fake CPU tensors."""
        from torch._subclasses.fake_tensor import FakeTensor

        if self.device.type != "cpu":
            return False
        is_virtual = isinstance(next(self.model.parameters()), FakeTensor)
        return not is_virtual or recipe.hardware.gpu == CPU

    def trainable(self) -> list[nn.Parameter]:
        """Return the trainable parameters, each once (tied ones too), in the model's order."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def trainable_by_block(self) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
        """Return the trainable parameters of each decoder block that has any, and all others."""
        from trainfit.models.layers import decoder_blocks

        blocks = decoder_blocks(self.model)
        groups = [[p for p in block.parameters() if p.requires_grad] for block in blocks]
        inside = {id(parameter) for group in groups for parameter in group}
        return [group for group in groups if group], [p for p in self.trainable() if id(p) not in inside]

    def optimizers_for(self, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        """Return new optimizers that update these parameters, each once."""
        assert self.make_optimizer is not None, "a technique that covers optimizer.name sets make_optimizer"
        return [self.make_optimizer(part) for part in self.kinds(parameters) if part]
