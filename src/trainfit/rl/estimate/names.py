"""Names of the parts of a policy's loop in ledgers and results. No torch here."""

from trainfit.ledger.ledger import RECORDED
from trainfit.spec.objective import Policy
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import PHASES

GATHER, PREFILL, WARM, DECODE = "gather", "prefill", "warm-up", "decode"
SCORING, REFERENCE, UPDATE = "scoring", "reference", "update"
UPDATE_PHASES = PHASES
ALONE = "alone"
"""Name of the step after the loops, in which one prompt is read."""
MEMORY = {
    "rollout": (GATHER, PREFILL, WARM, RECORDED, DECODE),
    "scoring": (SCORING, REFERENCE),
    "update": UPDATE_PHASES,
}
"""Phases of which a loop's memory is told, and their parts."""

BODY = "trainfit.rl.measure:measure_loops"


def of_update_alone(recipe: Recipe) -> str | None:
    """Return why the step alone is predicted and measured: empty, it has no loop; None: its loop is."""
    if not isinstance(recipe.objective, Policy):
        return ""
    if recipe.model.implementation != "native":
        return (
            "the update alone is predicted: rollouts run on the native decoder, model.implementation: native"
        )
    if recipe.offload.weights:
        return "the update alone is predicted: a rollout would copy all weights from the host for each token"
    return None


def body_of(recipe: Recipe) -> str:
    """Return what is measured of a recipe (``TrialRequest.body``): empty, its step; else its loop."""
    return BODY if of_update_alone(recipe) is None else ""
