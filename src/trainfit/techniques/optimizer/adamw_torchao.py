"""torchao's AdamW with 8-bit or 4-bit moments, by its own classes.

Its update is a function that torch.compile compiles for each shape of a weight, and that holds two fp32
copies of the weight while it runs; ``adamw8bit`` and ``adamw4bit`` keep the same moments without them. On the
virtual GPU the function is compiled as decoder blocks are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainfit.spec.optional import optional
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, OptimizerFacts, Technique, refusal
from trainfit.techniques.draft import Compiler, Draft
from trainfit.techniques.optimizer.adamw import (
    OPTIMIZER_FIELDS,
    describe_optimizer,
    in_words,
    refuse_momentum,
)

if TYPE_CHECKING:
    from torch import nn

CLASSES = {"torchao-adamw8bit": ("AdamW8bit", 1.0), "torchao-adamw4bit": ("AdamW4bit", 0.5)}
"""Value of ``optimizer.name`` -> class of torchao, bytes of each moment."""
LIBRARY = ("torchao.optim", "torchao")  # Module, extra of pyproject.toml


def check(recipe: Recipe) -> None:
    """Refuse momentum, implementations and offloading that its classes do not have."""
    refuse_momentum(recipe)
    options = recipe.optimizer
    if options.implementation != "fused":
        problem, remedy = f"{options.name} is one compiled function", "use fused or leave it out"
        raise refusal(recipe, "optimizer.implementation", problem, remedy)
    if options.stochastic_rounding:
        problem = "torchao's own rounding was not tried"
        remedy = "use optimizer.name: adamw8bit, or set stochastic_rounding: false"
        raise refusal(recipe, "optimizer.stochastic_rounding", problem, remedy)
    if recipe.offload.weights or recipe.offload.optimizer:
        problem = "torchao's moments are tensors of several parts, which offload does not move"
        raise refusal(recipe, "optimizer.name", problem, "use optimizer.name: adamw8bit, or no offload")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Set the class of torchao."""
    options = recipe.optimizer
    module: Any = optional(*LIBRARY, field="optimizer.name", value=options.name)
    kind, _ = CLASSES[options.name]
    settings: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    made = _compiled_by(draft.compiler, getattr(module, kind))
    draft.make_optimizer = lambda parameters: made(parameters, **settings)


def _compiled_by(compiler: Compiler, kind: Any) -> Any:
    """Return the class, its update compiled by ``compiler`` on the virtual GPU."""
    import torch
    from torch import nn
    from torch._guards import active_fake_mode

    from trainfit.virtual.trace.exclusive import replaced

    class Update(nn.Module):
        """A function as a module, which the virtual GPU's compiler takes."""

        def __init__(self, function: Any):
            super().__init__()
            self.function = function

        def forward(self, *args: Any) -> Any:
            return self.function(*args)

    updates: dict[Any, nn.Module] = {}
    original = torch.compile

    def compiled(function: Any, **settings: Any) -> Any:
        if "backend" in settings:  # The call by ``compiler`` itself.
            return original(function, **settings)
        if function not in updates:
            updates[function] = Update(function)
            compiler(updates[function], **settings)
        return updates[function]

    def step(self: Any, closure: Any = None) -> Any:
        if active_fake_mode() is None:
            return kind.step(self, closure)
        with replaced(torch, "compile", compiled):
            return kind.step(self, closure)

    return type(kind.__name__, (kind,), {"step": step})


def _moments(recipe: Recipe, _: float = 0.0) -> tuple[float, ...]:
    return (CLASSES[recipe.optimizer.name][1],) * 2


def _describe_state(recipe: Recipe, _: float) -> str:
    bits = 8 * CLASSES[recipe.optimizer.name][1]
    return in_words(f"torchao's {bits:g}-bit AdamW", _moments(recipe))


TECHNIQUE = Technique(
    name="adamw_torchao",
    order=254,
    title="AdamW of torchao",
    fields=OPTIMIZER_FIELDS,
    covers={"optimizer.name": tuple(CLASSES)},
    check=check,
    apply=apply,
    describe=describe_optimizer,
    library=LIBRARY,
    examples=tuple({"optimizer": {"name": name}} for name in CLASSES),
    draw=Draw(alone=lambda chance, _: {"optimizer": {"name": chance.choice(tuple(CLASSES))}}),
    optimizer=OptimizerFacts(
        moments=_moments,
        states=(),
        describe=_describe_state,
    ),
    trace_whole=lambda recipe: True,  # Its states are made without the weight, which would name their layer.
)
