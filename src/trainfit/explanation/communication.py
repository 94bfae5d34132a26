"""When a recipe of several GPUs is bound by communication, from its ledger.

A phase is compute-bound where its operations take at least as long as its collectives, which overlap them.
Both are linear in the batch: lines through the recipe's step and one of twice its micro-batch. The
optimizer's collectives are left out, which no larger batch hides.
"""

from trainfit.ledger.ledger import Ledger
from trainfit.prediction import communication
from trainfit.prediction.estimate import ledger_of
from trainfit.prediction.roofline import op_s
from trainfit.spec.hardware import Gpu
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import CommunicationBound, PhaseCommunication
from trainfit.virtual.cuda.op_kinds import COPY_DIRECTIONS

PHASES: tuple[str, ...] = ("forward", "backward")


def communication_bound(recipe: Recipe, gpu: Gpu, ledger: Ledger) -> CommunicationBound | None:
    """Return the smallest compute-bound batch of the recipe; None without collectives or known rates."""
    gpu = communication.on_hosts(gpu, recipe.hardware)
    if not ledger.collectives or gpu.memory_bytes_per_s is None or not gpu.peak_flops_per_s:
        return None
    batch = recipe.batch.model_copy(update={"micro": 2 * recipe.batch.micro})
    twice = _seconds(ledger_of(recipe.model_copy(update={"batch": batch})), gpu)
    once = _seconds(ledger, gpu)
    tokens = recipe.batch.tokens * recipe.mesh.replicate * recipe.mesh.shard
    phases = tuple(
        PhaseCommunication(
            phase=phase,
            compute_s=once[phase][0],
            communication_s=once[phase][1],
            compute_bound_tokens=_compute_bound(tokens, once[phase], twice[phase]),
        )
        for phase in PHASES
        if once[phase][1]
    )
    least = [one.compute_bound_tokens for one in phases]
    return CommunicationBound(
        tokens=tokens,
        phases=phases,
        compute_bound_tokens=None if None in least else max((one for one in least if one), default=0.0),
    )


def _compute_bound(tokens: int, once: tuple[float, float], twice: tuple[float, float]) -> float | None:
    """Return the tokens at which the computation takes as long as the communication; None: never."""
    lead_s, lead_twice_s = (compute_s - moved_s for compute_s, moved_s in (once, twice))
    growth_s = lead_twice_s - lead_s
    if growth_s <= 0:
        return 0.0 if lead_s > 0 else None
    return max(0.0, tokens * (1 - lead_s / growth_s))


def _seconds(ledger: Ledger, gpu: Gpu) -> dict[str, tuple[float, float]]:
    """Return the expected seconds of each phase's operations and of its collectives, in the steady step."""
    computes, communicates = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
    for op in ledger.steady_ops:
        phase = ledger.segments[op.segment].phase
        if phase in computes and op.name not in COPY_DIRECTIONS:
            computes[phase] += ledger.times(op) * op_s(op, gpu)
    for segment, (all_s, _) in communication.collectives_s(ledger, gpu).items():
        if ledger.segments[segment].phase in communicates:
            communicates[ledger.segments[segment].phase] += all_s
    return {phase: (computes[phase], communicates[phase]) for phase in PHASES}
