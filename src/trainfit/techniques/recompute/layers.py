"""Plan by block: each decoder block recomputes nothing, its elementwise operations or everything.

A share of a block's saved tensors can wait in pinned host memory. The planner makes such plans of a budget
(``recompute: {budget_gib: x}``, evidence/pages/recompute-budget.md); they can also be written by hand.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from trainfit.catalog.load import model_config
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.recompute import BudgetGib, LayerRun, Layers
from trainfit.techniques.base import Data, Draw, Offer, Technique, refusal
from trainfit.techniques.draft import Draft
from trainfit.techniques.recompute.every import checkpoint_labelled, labelled_blocks

if TYPE_CHECKING:
    from torch import nn


def check(recipe: Recipe) -> None:
    """Refuse an unplanned budget, and plans by operation in compiled code."""
    if recipe.plans_recompute:
        problem = "a budget must be planned before a step is built"
        remedy = (
            "plan it with trainfit.planning.recompute.resolve, as the commands do, "
            "or write out recompute: {layers: [...]}"
        )
        raise refusal(recipe, planned_field(recipe), problem, remedy)
    if recipe.compile and any(run.recompute == "elementwise" or run.offload for run in _runs(recipe)):
        problem = "compiled code has no single operations to keep, recompute or offload"
        remedy = "use full and none in the layers, recompute: {budget: share}, or compile: false"
        raise refusal(recipe, "recompute.layers", problem, remedy)


def planned_field(recipe: Recipe) -> str:
    """Return the field whose value is still to be planned."""
    return "recompute.budget_gib" if isinstance(recipe.recompute, BudgetGib) else "recompute"


def _runs(recipe: Recipe) -> tuple[LayerRun, ...]:
    return recipe.recompute.layers if isinstance(recipe.recompute, Layers) else ()


def _label_blocks(recipe: Recipe, model: nn.Module) -> None:
    """Label every block with its part of the plan, before a traced model is shortened."""
    from trainfit.models.layers import decoder_blocks
    from trainfit.virtual.trace.repeated_layers import BLOCK_CONFIG

    blocks, planned = decoder_blocks(model), [block for run in _runs(recipe) for block in run.blocks()]
    if len(planned) != len(blocks):
        raise InputError(
            f"the entries add up to {len(planned)} blocks, but the model has {len(blocks)}",
            "write one entry a block, or {recompute: ..., count: n} for n of them",
            field="recompute.layers",
            value=[f"{run.count} {run.recompute}" for run in _runs(recipe)],
        )
    # The last block's backward follows its forward at once, which leaves no time for a copy.
    planned[-1] = planned[-1].model_copy(update={"offload": 0.0})
    for block, run in zip(blocks, planned, strict=True):
        setattr(block, BLOCK_CONFIG, f"{run.recompute} {run.offload}")


def _min_repeated(recipe: Recipe) -> int:
    """Return the number of blocks that must be traced together.

    A fully recomputed block's input belongs to the block before it, and leaves while the block after it
    runs.
    """
    return 2 if any(run.recompute == "full" and run.offload for run in _runs(recipe)) else 1


def apply(recipe: Recipe, draft: Draft) -> None:
    """Give each block the forward of its label."""
    from trainfit.checkpointing.per_block import PerBlockSaving

    labelled = labelled_blocks(recipe, draft.model, _label_blocks)
    if recipe.compile:
        # With its number as an attribute each block would be compiled separately.
        checkpoint_labelled(recipe, labelled)
        return
    block_config = [(level, float(share)) for level, share in (label.split() for _, label in labelled)]
    PerBlockSaving([block for block, _ in labelled], draft.device, block_config).install()


def _describe(recipe: Recipe) -> str:
    if recipe.plans_recompute:
        goal = recipe.recompute
        return f"recompute budget_gib {goal.budget_gib}" if isinstance(goal, BudgetGib) else "recompute fit"
    return "recompute " + " + ".join(
        f"{run.count} {run.recompute}{' (partly offloaded)' if run.offload else ''}" for run in _runs(recipe)
    )


def _draw(chance: random.Random, recipe: Data) -> Data:
    """Draw a plan of up to four runs over the model's blocks; for compiled code of ``none`` and ``full``."""
    blocks, runs = _num_blocks(recipe), []
    cuts = sorted(chance.sample(range(1, blocks), min(blocks - 1, chance.randint(0, 3))))
    for begin, end in zip([0, *cuts], [*cuts, blocks], strict=True):
        run: Data = {"recompute": chance.choice(("none", "full")), "count": end - begin}
        if not recipe.get("compile"):
            run["recompute"] = chance.choice(("none", "elementwise", "elementwise", "full"))
            run["offload"] = chance.choice((0.0, 0.0, 0.25, 0.5, 1.0))
            run["every"] = chance.choice((1, 1, 2))
        runs.append(run)
    return {"recompute": {"layers": runs}}


def _num_blocks(recipe: Data) -> int:
    config = model_config(recipe["model"]["config"])
    return next(int(config[key]) for key in ("num_hidden_layers", "n_layer", "num_layers") if key in config)


TECHNIQUE = Technique(
    name="recompute_layers",
    order=110,
    title="Plan by block",
    covers={"recompute": ("layers", "budget_gib", "fit")},
    check=check,
    apply=apply,
    describe=_describe,
    variants=(
        {"recompute": {"layers": [{"recompute": "none", "offload": 0.5, "count": 16}]}},
        {"recompute": {"budget_gib": 20}},
        {"recompute": "fit"},
    ),
    examples=({"recompute": {"layers": [{"recompute": "elementwise", "count": 16}]}},),
    draw=Draw(alone=_draw),
    label_blocks=_label_blocks,
    min_repeated=_min_repeated,
    offers=lambda recipe: (Offer({"recompute": {"budget_gib": 1.0}}),),
)
