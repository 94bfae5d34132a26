"""Adafactor: the second moment as one row and one column per matrix (Shazeer and Stern, arXiv:1804.04235).

With momentum (the paper's beta1, a whole fp32 first moment) or absolute steps it is transformers', with
``relative_step=False``; its learning rate means what torch's means unless ``scale_parameter`` is False.
``fused`` is trainfit's
(optim/adafactor.py), without scratch of a weight's size and without waiting for the host.
"""

from functools import partial

from trainfit.spec.hardware import Gpu
from trainfit.spec.recipe import Recipe
from trainfit.techniques._triton_gpus import refuse_older
from trainfit.techniques.base import Draw, Offer, OptimizerFacts, Technique, refusal
from trainfit.techniques.draft import Draft
from trainfit.techniques.optimizer.adamw import OPTIMIZER_FIELDS, describe_optimizer, smaller_state
from trainfit.techniques.optimizer.stochastic_rounding import seeded, seeds


def check(recipe: Recipe) -> None:
    """Refuse momentum with an implementation other than ``forloop``."""
    if recipe.optimizer.momentum and recipe.optimizer.implementation != "forloop":
        remedy = "use forloop or leave it out, or set optimizer.momentum: 0"
        problem = "Adafactor with momentum is only implemented as a loop over the weights"
        raise refusal(recipe, "optimizer.implementation", problem, remedy)
    if not recipe.optimizer.scale_parameter and recipe.optimizer.implementation == "foreach":
        remedy = "use optimizer.implementation: fused or forloop"
        problem = "torch's Adafactor always multiplies its rate by the weights' size"
        raise refusal(recipe, "optimizer.scale_parameter", problem, remedy)


def check_gpu(recipe: Recipe, gpu: Gpu) -> None:
    """Refuse a GPU that cannot run the fused kernels."""
    if recipe.optimizer.implementation == "fused":
        refuse_older(recipe, gpu, "optimizer.implementation", "use foreach or forloop")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Set torch's Adafactor, trainfit's (fused) or transformers' (with momentum)."""
    options = recipe.optimizer
    common = {"lr": options.lr, "weight_decay": options.weight_decay}
    if options.implementation == "fused":
        from trainfit.optim.adafactor import FusedAdafactor

        stochastic = options.stochastic_rounding
        more = {"stochastic": stochastic, "scaled": options.scale_parameter}
        draft.make_optimizer = seeded(seeds(recipe), FusedAdafactor, **more, **common)
    elif options.momentum or not options.scale_parameter:
        from transformers.optimization import Adafactor

        kind = {"beta1": options.momentum or None, "scale_parameter": options.scale_parameter}
        draft.make_optimizer = partial(Adafactor, relative_step=False, **kind, **common)
    else:
        import torch

        foreach = options.implementation == "foreach"
        draft.make_optimizer = partial(torch.optim.Adafactor, foreach=foreach, **common)


def _describe_state(recipe: Recipe, _: float) -> str:
    momentum = "momentum 4 B and " if recipe.optimizer.momentum else ""
    return f"Adafactor {momentum}rows and columns of the second moment, under 0.1 B"


TECHNIQUE = Technique(
    name="adafactor",
    order=270,
    title="Adafactor",
    fields=OPTIMIZER_FIELDS,
    covers={"optimizer.name": ("adafactor",)},
    check_gpu=check_gpu,
    check=check,
    apply=apply,
    describe=describe_optimizer,
    variants=tuple(
        {"optimizer": {"name": "adafactor", "implementation": implementation, "momentum": momentum}}
        for implementation in ("foreach", "fused")
        for momentum in (0.0, 0.9)
    ),
    examples=(
        {"optimizer": {"name": "adafactor"}},
        {"optimizer": {"name": "adafactor", "implementation": "fused"}},
    ),
    draw=Draw(
        alone=lambda chance, _: {"optimizer": {"name": "adafactor", "implementation": "fused"}},
        weights={"optimizer.name": {"adafactor": 2}},
        options=lambda chance: {"momentum": chance.choice((0.0, 0.0, 0.9))},
    ),
    offers=lambda recipe: (
        Offer(
            {"optimizer": {"name": "adafactor", "implementation": "fused"}},
            smaller_state(recipe, "adafactor"),
            numerics="factored second moments",
        ),
    ),
    optimizer=OptimizerFacts(
        moments=lambda recipe, _: (4.0,) if recipe.optimizer.momentum else (),
        states=(
            {"step": "number", "row_var": "rows", "col_var": "columns"},
            {"step": "number", "variance": "squares"},
            # transformers', without and with momentum
            {"step": "number", "RMS": "number", "exp_avg_sq": "squares"},
            {"step": "number", "RMS": "number", "exp_avg_sq_row": "rows", "exp_avg_sq_col": "columns"},
            {"step": "number", "RMS": "number", "exp_avg": "weight", "exp_avg_sq": "squares"},
            {
                "step": "number",
                "RMS": "number",
                "exp_avg": "weight",
                "exp_avg_sq_row": "rows",
                "exp_avg_sq_col": "columns",
            },
        ),
        describe=_describe_state,
    ),
)
