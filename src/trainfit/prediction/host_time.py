"""Seconds that the host needs to issue one operation: Python, dispatch, autograd, launch. No torch here."""

from trainfit.catalog.rates import HostRates
from trainfit.ledger.ledger import Collective, Ledger, Op


def issue_s(op: Op, ledger: Ledger, rates: HostRates) -> float:
    """Return the seconds from the entry before to the launch of this one.

    Args:
        op: an entry of the steady step; of one on lists of several groups' tensors only one launches.
    """
    views, modules, graphs, _ = op.host
    phase = ledger.segments[op.segment].phase
    backward = phase == "backward" and not op.is_update
    in_graph = op.name.startswith("triton_") or op.name.endswith(".out") or "empty_strided" in op.name
    if in_graph:
        launch_s = rates.in_graph
    elif "_foreach_" in op.name:
        launch_s = rates.foreach
    elif phase == "optimizer":
        launch_s = rates.optimizer
    elif op.is_update:
        launch_s = rates.update_in_backward
    else:
        launch_s = rates.backward if backward else rates.forward
    view_s = rates.view_in_graph if in_graph else rates.view_in_backward if backward else rates.view
    module_s = rates.module_in_backward if backward else rates.module
    calls, tensors = op.wrapped
    wrapped_s = calls * rates.wrapped + tensors * rates.wrapped_tensor
    return launch_s * bool(op.calls) + views * view_s + modules * module_s + graphs * rates.graph + wrapped_s


def collective_issue_s(one: Collective, rates: HostRates) -> float:
    """Return the host's seconds to issue a collective, with all that FSDP2 does around it."""
    if not one.num_parameters:
        return rates.collective
    if one.name == "all_gather":
        return rates.unshard + one.num_parameters * rates.unshard_parameter
    return rates.reduce + one.num_parameters * rates.reduce_parameter
