"""When a recipe of several GPUs is bound by communication, from its ledger.

A phase is compute-bound where its operations take at least as long as its collectives.
Both are linear in the batch: lines through the recipe's step and one of twice its micro-batch. The
optimizer's collectives are left out, which no larger batch hides.
"""

from typing import NamedTuple

from trainfit.ledger.ledger import Ledger
from trainfit.prediction import communication
from trainfit.prediction.device_time import op_s
from trainfit.prediction.estimate import ledger_of
from trainfit.spec.hardware import Gpu
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import CommunicationBound, PhaseCommunication
from trainfit.virtual.cuda.op_kinds import COPY_DIRECTIONS

PHASES: tuple[str, ...] = ("forward", "backward")


def communication_bound(recipe: Recipe, gpu: Gpu, ledger: Ledger) -> CommunicationBound | None:
    """Return the smallest compute-bound batch of the recipe; None without collectives or known rates.

    Also None for a pipeline, whose GPU's ledger has its micro-batches but not their time.
    """
    if recipe.mesh.pipeline > 1:
        return None
    gpu = communication.on_hosts(gpu, recipe.hardware)
    if not ledger.collectives or gpu.memory_bytes_per_s is None or not gpu.peak_flops_per_s:
        return None
    batch = recipe.batch.model_copy(update={"micro": 2 * recipe.batch.micro})
    twice = _by_phase(ledger_of(recipe.model_copy(update={"batch": batch})), gpu)
    tokens = recipe.batch.tokens * recipe.mesh.replicate * recipe.mesh.shard
    phases = tuple(
        PhaseCommunication(
            phase=phase,
            compute_s=one.compute_s,
            communication_s=one.moved_s,
            exposed_s=one.exposed_s,
            compute_bound_tokens=_compute_bound(tokens, one, twice[phase]),
        )
        for phase, one in _by_phase(ledger, gpu).items()
        if one.moved_s
    )
    least = [one.compute_bound_tokens for one in phases]
    return CommunicationBound(
        tokens=tokens,
        phases=phases,
        compute_bound_tokens=None if None in least else max((one for one in least if one), default=0.0),
    )


class Times(NamedTuple):
    """Expected seconds of a phase's operations, of its collectives, and of those that are not hidden."""

    compute_s: float = 0.0
    moved_s: float = 0.0
    exposed_s: float = 0.0


def _compute_bound(tokens: int, once: Times, twice: Times) -> float | None:
    """Return the tokens at which the computation takes as long as the communication; None: never."""
    lead_s, lead_twice_s = (one.compute_s - one.moved_s for one in (once, twice))
    growth_s = lead_twice_s - lead_s
    if growth_s <= 0:
        return 0.0 if lead_s > 0 else None
    return max(0.0, tokens * (1 - lead_s / growth_s))


def _by_phase(ledger: Ledger, gpu: Gpu) -> dict[str, Times]:
    """Return the times of the steady step's forward and backward."""
    busy_s: dict[int, float] = {}
    for op in ledger.steady_ops:
        if op.name not in COPY_DIRECTIONS:
            busy_s[op.segment] = busy_s.get(op.segment, 0.0) + ledger.times(op) * op_s(op, gpu)
    moved = communication.collectives_s(ledger, gpu, op_s)
    found = dict.fromkeys(PHASES, Times())
    for segment, compute_s in busy_s.items():
        all_s, exposed_s = moved.get(segment, (0.0, 0.0))
        phase = ledger.segments[segment].phase
        if phase in found:
            one = found[phase]
            found[phase] = Times(one.compute_s + compute_s, one.moved_s + all_s, one.exposed_s + exposed_s)
    return found
