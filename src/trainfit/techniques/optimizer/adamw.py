"""AdamW: ``torch.optim.AdamW`` (Loshchilov and Hutter, arXiv:1711.05101), two moments of each weight's dtype.

With stochastic rounding it is trainfit's (optim/adamw.py): weights and moments in bf16. With precision
bf16-master or fp16-master it is trainfit's too: 16-bit weights, fp32 master weights and moments, in one
kernel. So it is with ``implementation: triton``: computed in fp32 and rounded to nearest, as torch's fused.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from trainfit.spec.hardware import Gpu
from trainfit.spec.recipe import Recipe
from trainfit.techniques._triton_gpus import refuse_older
from trainfit.techniques.base import Data, Draw, Expected, OptimizerFacts, StateKind, Technique, refusal
from trainfit.techniques.draft import Draft
from trainfit.techniques.optimizer.stochastic_rounding import seeded, seeds

STATE: dict[str, StateKind] = {"step": "number", "exp_avg": "weight", "exp_avg_sq": "squares"}
WITH_MASTER: dict[str, StateKind] = {**STATE, "master": "weight"}
KERNEL, INSTEAD = "optimizer.implementation", "use optimizer.implementation: fused"
OPTIMIZER_FIELDS = ("optimizer.name", "optimizer.implementation", "optimizer.momentum")


def refuse_momentum(recipe: Recipe) -> None:
    """Refuse momentum, which every AdamW has."""
    if recipe.optimizer.momentum:
        remedy = "remove it, or use optimizer.name: sgd or adafactor"
        raise refusal(recipe, "optimizer.momentum", "AdamW always keeps a first moment (beta 0.9)", remedy)


def check_gpu(recipe: Recipe, gpu: Gpu) -> None:
    """Refuse a GPU that cannot run the kernel."""
    if recipe.optimizer.implementation == "triton":
        refuse_older(recipe, gpu, KERNEL, INSTEAD)


def check_device(recipe: Recipe, device_type: str) -> None:
    """Refuse a real GPU without Triton."""
    if recipe.optimizer.implementation == "triton":
        from trainfit.kernels.custom_op import require_triton

        require_triton(device_type, KERNEL, "triton", INSTEAD.removeprefix("use "))


def apply(recipe: Recipe, draft: Draft) -> None:
    """Set AdamW with an explicit implementation, because torch's default depends on the device."""
    draft.make_optimizer = adamw(recipe, seeds(recipe))


def adamw(recipe: Recipe, numbers: Iterator[int]) -> Callable[..., Any]:
    """Return a function that makes the recipe's AdamW for some parameters.

    Args:
        numbers: seeds of stochastic rounding, shared with other optimizers.
    """
    import torch

    options = recipe.optimizer
    common = {"lr": options.lr, "weight_decay": options.weight_decay}
    if options.stochastic_rounding or recipe.optimizer_keeps_master or options.implementation == "triton":
        from trainfit.optim.adamw import FusedAdamW

        kind = {"stochastic": options.stochastic_rounding, "master": recipe.optimizer_keeps_master}
        return seeded(numbers, FusedAdamW, **kind, **common)
    foreach, fused = options.implementation == "foreach", options.implementation == "fused"
    return partial(torch.optim.AdamW, foreach=foreach, fused=fused, **common)


def in_words(name: str, moments: tuple[float, ...], word: str = "moments") -> str:
    """Describe an optimizer's state in bytes per parameter: ``AdamW moments 2 + 2 B``."""
    sizes = " + ".join(f"{size:g}" for size in moments)
    return f"{name} {word} {sizes} B" if moments else f"{name} without moments, 0 B"


def describe_optimizer(recipe: Recipe) -> str:
    """Return the optimizer's name and implementation, its momentum, and whether steps are absolute."""
    optimizer = recipe.optimizer
    momentum = f" momentum {optimizer.momentum:g}" if optimizer.momentum else ""
    absolute = "" if optimizer.scale_parameter else " absolute steps"
    return f"{optimizer.name} {optimizer.implementation}{momentum}{absolute}"


def smaller_state(recipe: Recipe, name: str) -> Expected:
    """Return the expected effect of an optimizer whose state is smaller than AdamW's.

    States were 0.25 to 0.5 of AdamW's.
    """
    return Expected() if recipe.optimizer.name == name else Expected(optimizer=0.4)


def _describe(recipe: Recipe) -> str:
    return "" if recipe.optimizer.implementation == "fused" else describe_optimizer(recipe)


def _moments(recipe: Recipe, weight: float) -> tuple[float, ...]:
    """Return the bytes per parameter of the master weights, if it keeps them, and of both moments."""
    return (4.0, 4.0, 4.0) if recipe.optimizer_keeps_master else (weight, weight)


def _options(chance: random.Random) -> Data:
    return {"implementation": chance.choice(("fused", "foreach", "forloop"))}


TECHNIQUE = Technique(
    name="adamw",
    order=240,
    title="AdamW",
    fields=OPTIMIZER_FIELDS,
    covers={"optimizer.name": ("adamw",)},
    check=refuse_momentum,
    check_gpu=check_gpu,
    check_device=check_device,
    apply=apply,
    describe=_describe,
    variants=tuple(
        {"optimizer": {"name": "adamw", "implementation": one}} for one in ("fused", "forloop", "triton")
    ),
    examples=({"optimizer": {"implementation": "foreach"}},),
    draw=Draw(weights={"optimizer.name": {"adamw": 5}}, options=_options),
    optimizer=OptimizerFacts(
        moments=_moments,
        states=(STATE, WITH_MASTER),
        sharded_by=("fsdp", "expert_parallel", "tensor_parallel"),
        describe=lambda recipe, weight: in_words("AdamW", _moments(recipe, weight)[-2:]),
    ),
)
