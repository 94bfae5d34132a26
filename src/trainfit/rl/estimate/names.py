"""Names of the parts of a policy's loop in ledgers and results. No torch here."""

from trainfit.ledger.ledger import RECORDED
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
