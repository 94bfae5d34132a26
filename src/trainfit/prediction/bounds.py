"""Bounds of a step's time: how far measured steps were from expected ones."""

from trainfit.catalog.constants import constants
from trainfit.catalog.rates import rates
from trainfit.ledger.ledger import Ledger
from trainfit.prediction.machine import Machine
from trainfit.prediction.time.host_time import counts_python
from trainfit.prediction.time.roofline import Roofline
from trainfit.spec.hardware import Gpu
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Interval


def script_bounds(time: Roofline | None, gpu: Gpu, ledger: Ledger) -> dict[str, Interval]:
    """Return the bounds of a traced script's step, as far as steps were measured on the GPU."""
    if time is None or gpu.step_time_range is None or not time.expected.total or not counts_python(ledger):
        return {}
    low, high = time.script_range()
    host, device = rates().script_host, rates().device_bound
    decides = "the host" if time.waits else "the GPU"
    basis = (
        f"{decides} decides. {device.low:g} to {device.high:g} times the GPU's expected time, and "
        f"{host.low:g} to {host.high:g} times the host's, which held for {host.basis}; a host of your "
        "own: trainfit calibrate --host"
    )
    return {"step_s": Interval(low=low, high=high, basis=basis)}


def bounds(time: Roofline | None, machine: Machine, recipe: Recipe) -> dict[str, Interval]:
    """Return the bounds of a step's time, by the name of the Estimate's field."""
    if time is None:
        return {}
    gpu, known = machine.gpu, machine.known
    published = None if gpu.sustained is None else gpu.sustained.steps
    expected, measured = time.expected.total, published or gpu.step_time_range
    if measured is None:
        low, high = time.lowest_s, gpu.highest_step_ratio * expected
        basis = (
            "low: every operation at the data sheet's rate; "
            f"high: {gpu.highest_step_ratio:g} times the expectation, whose rates are those of "
            f"{known.gpu.name} and its host"
        )
    elif gpu.step_time_range is not None and (
        recipe.hardware.count == 1
        # Of several H100s steps are published, but none was measured.
        or (published is None and not recipe.compile and recipe.hardware.count <= gpu.gpus_per_host)
    ):
        several, own_host = recipe.hardware.count > 1, known.has_own_host
        band = time.band(compiled=bool(recipe.compile), several_gpus=several, own_host=own_host)
        low, high = max(band.low * expected, time.lowest_s), band.high * expected
        basis = (
            f"{band.low:.3g} to {band.high:.3g} times the expected time, as {band.basis} that the rates were "
            "learned from"
        )
        if time.on_slowest_host > 1 and not own_host:
            basis += f", on a host whose work takes up to {constants().host.slowest:g} times as long"
        basis += "; a slower host or other clocks can exceed it"
    else:
        low, high = max(measured.low * expected, time.lowest_s), measured.high * expected
        basis = (
            f"{measured.low:g} to {measured.high:g} times the expected time; {measured.basis}; a slower host "
            "or other clocks can exceed it"
        )
    return {"step_s": Interval(low=low, high=high, basis=basis)}
