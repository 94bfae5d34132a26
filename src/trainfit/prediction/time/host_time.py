"""Seconds that the host needs to issue one operation: Python, dispatch, autograd, launch. No torch here."""

import itertools
import re

from trainfit.catalog.rates import HostRates, rates
from trainfit.ledger.ledger import Collective, Ledger, Op
from trainfit.prediction.time.experts import is_looped, num_groups

BLOCK = re.compile(r"\.\d+(?=\.|$)")


class Issue:
    """The host's work of a ledger's operations.

    A block that the backward recomputes costs ``checkpoint``, whatever it holds: random states are saved and
    restored, hooks pack and unpack what it saves. Its first recomputed product or module stands for it.
    """

    def __init__(self, ledger: Ledger, rates: HostRates):
        self._phases, self._rates = [segment.phase for segment in ledger.segments], rates
        first: dict[tuple[int, int, str], Op] = {}
        for op in ledger.steady_ops:
            backward = self._phases[op.segment] == "backward" and not op.is_update
            # A compiled model recomputes within its graph; what calls a compiled block enters a module.
            # (Its attention has no module.)
            if backward and (op.host[1] or (op.module and ledger.recomputes(op) and not _is_in_graph(op))):
                number = BLOCK.search(op.module)
                first.setdefault((op.segment, op.group, op.module[: number.end() if number else 0]), op)
        self._first = {id(op) for op in first.values()}
        # Autograd adds up gradients of micro-batches by itself; the optimizer in the backward, which has one
        # micro-batch, runs from Python.
        steady = [segment.phase for segment in ledger.segments if segment.step == "steady"]
        self._accumulates = steady.count("backward") > 1
        computed = (op for op in ledger.steady_ops if self._phases[op.segment] != "data")
        self._first_of_step = {id(op) for op in itertools.islice(computed, 1)}

    def recomputes(self, op: Op) -> bool:
        """Return whether a recomputed block begins with an entry, the ledger's own object."""
        return id(op) in self._first

    def seconds(self, op: Op) -> float:
        """Return the seconds from the entry before to the launch of this one.

        Args:
            op: an entry of the steady step, the ledger's own object; of one on lists of several groups'
                tensors only one launches.
        """
        rates, phase = self._rates, self._phases[op.segment]
        views, modules, graphs, _ = op.host
        backward = phase == "backward" and not op.is_update
        in_graph = _is_in_graph(op)
        if op.name.startswith("trainfit."):
            of_update = op.is_update or phase == "optimizer"
            launch_s = (
                rates.python_update if of_update
                else rates.python_op_backward if "_backward" in op.name
                else rates.python_op
            )  # fmt: skip
        elif in_graph:
            launch_s = rates.allocation if "empty_strided" in op.name else rates.in_graph
        elif "_foreach_" in op.name:
            launch_s = rates.foreach
        elif phase == "optimizer":
            launch_s = rates.optimizer
        elif op.is_update and not self._accumulates:
            launch_s = rates.update_in_backward
        else:
            launch_s = rates.backward if phase == "backward" else rates.forward
        view_s = rates.view_in_graph if in_graph else rates.view_in_backward if backward else rates.view
        block_s = rates.checkpoint * (id(op) in self._first) + rates.step * (id(op) in self._first_of_step)
        calls, tensors = op.wrapped
        wrapped_s = calls * rates.wrapped + tensors * rates.wrapped_tensor + op.in_mode * rates.in_mode
        if "baddbmm" in op.name and op.module.endswith("base_layer"):
            wrapped_s += rates.parametrized
        if op.name == "aten._scaled_mm.default":
            wrapped_s += rates.scaled_product
        called_s = views * view_s + modules * rates.module + graphs * rates.graph
        return launch_s * bool(op.calls) + called_s + block_s + wrapped_s


class ScriptIssue:
    """The host's work of a traced script: launches, and the Python functions called between them.

    A script's Python is its own: a recipe's costs of modules and wrapped tensors do not hold there, but each
    of them is Python that the trace counted. A recomputed block also saves and restores random states, in
    code of ``torch.cuda`` that the virtual GPU replaces. Launches of compiled code have the costs that they
    have in a recipe.
    """

    def __init__(self, ledger: Ledger, rates: HostRates):
        self._rates, self._of_recipe = rates, Issue(ledger, rates)

    def recomputes(self, op: Op) -> bool:
        """Return whether a recomputed block begins with an entry."""
        return self._of_recipe.recomputes(op)

    def seconds(self, op: Op) -> float:
        """Return the seconds from the entry before to the launch of this one."""
        rates = self._rates
        python_s = op.python * rates.script_call + rates.script_block * self.recomputes(op)
        if _is_in_graph(op):
            return self._of_recipe.seconds(op) + python_s
        return rates.script_launch * bool(op.calls) + op.host[2] * rates.graph + python_s


def issue_of(ledger: Ledger, rates: HostRates) -> Issue | ScriptIssue:
    """Return the host's work of a ledger: a script's where its Python was counted, else a recipe's."""
    return (ScriptIssue if counts_python(ledger) else Issue)(ledger, rates)


def num_recomputed_blocks(ledger: Ledger) -> int:
    """Return the number of blocks that the steady step's backward recomputes."""
    issue = issue_of(ledger, rates().host)
    return sum(ledger.times(op) for op in ledger.steady_ops if issue.recomputes(op))


def counts_python(ledger: Ledger) -> bool:
    """Return whether the Python functions that a script called were counted."""
    return any(op.python for op in ledger.steady_ops)


def _is_in_graph(op: Op) -> bool:
    return op.name.startswith("triton_") or op.name.endswith(".out") or "empty_strided" in op.name


def collective_issue_s(one: Collective, rates: HostRates, *, counts_python: bool = False) -> float:
    """Return the host's seconds to issue a collective, with all that FSDP2 does around it.

    Args:
        counts_python: FSDP2's Python is among the functions that were counted.
    """
    if counts_python or not one.num_parameters:
        return rates.collective
    if one.kind.gathers:
        return rates.unshard + one.num_parameters * rates.unshard_parameter
    return rates.reduce + one.num_parameters * rates.reduce_parameter


def loop_issue_s(op: Op, rates: HostRates) -> float:
    """Return the host's seconds to issue a loop over groups' products, after the first; else 0."""
    return (num_groups(op) - 1) * rates.looped if is_looped(op) else 0.0
