"""Time that torch.compile takes before the first step, and the step from which on it pays. No torch here."""

from trainfit.catalog.constants import constants
from trainfit.ledger.ledger import Ledger
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Compilation, Estimate, Interval
from trainfit.techniques import registry


def compilation(ledger: Ledger, gpu: Gpu) -> Compilation | None:
    """Return what is compiled and how long it takes; None: nothing, or C++ for a CPU, which was not timed."""
    graphs, kernels = ledger.compiled
    if not graphs or gpu.vendor == "host":
        return None
    known = constants().compile
    seconds = known.process_s + known.start_s + kernels * known.kernel_s
    basis = f"{known.low:g} to {known.high:g} times the expected time; {known.basis}"
    return Compilation(
        seconds=seconds,
        bounds=Interval(low=known.low * seconds, high=known.high * seconds, basis=basis),
        num_graphs=graphs,
        num_kernels=kernels,
    )


def without(recipe: Recipe) -> Recipe | None:
    """Return the recipe without compilation; None: a technique of it requires compilation."""
    eager = recipe.model_copy(update={"compile": False})
    try:
        registry.check(eager)
    except InputError:
        return None
    return eager


def compared(found: Estimate, eager: Estimate | None) -> Estimate:
    """Return a compiled recipe's estimate with what it gains over the same recipe without compilation.

    Args:
        eager: of that recipe; None: it cannot work.
    """
    one = found.compilation
    if one is None or eager is None or not eager.step_s or not found.step_s:
        return found
    gain_s = eager.step_s - found.step_s
    update = {
        "eager_step_s": eager.step_s,
        "eager_fits": eager.fits,
        "pays_from_steps": int(one.seconds / gain_s) + 1 if gain_s > 0 else None,
    }
    return found.model_copy(update={"compilation": one.model_copy(update=update)})
