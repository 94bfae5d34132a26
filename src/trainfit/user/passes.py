"""Forwards of user code, and which of them a training step needs.

A *pass* is a call of an outermost module. It belongs to the training step if its results reach a backward.
Otherwise it is an evaluation, or a generation. The data flow decides:

- A pass with gradients belongs to the step if a node of its graph runs in a backward.
- A pass without gradients belongs to it if its results are inputs of a pass that does, or of the tensor that
  ``backward`` is called on: a reference model's log-probabilities, a teacher's logits, an encoder's latents,
  the discriminator's fake images, the first forward of a block that the backward recomputes.
- Sampled tokens are integers, and integers carry no value of the loss. A pass whose results reach the step as
  integers alone belongs to it (a teacher's hard labels), unless it is one of a chain, where the integers of
  one pass are inputs of the next pass of the same module: that is a generation, also with gradients on.

One step of GRPO, with its passes numbered, and how each is found:

    tokens = policy.generate(prompts)           1, 2, 3   2 reads the token that 1 sampled: generation
    with torch.no_grad():
        old = log_probs(policy, tokens)         4         floats reach the loss: step
        known = log_probs(reference, tokens)    5         floats reach the loss: step
    loss = grpo(policy(tokens), old, known)     6         its graph's nodes run in the backward: step
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        print(validation_loss(policy))          7         nothing reads it: evaluation
"""

import bisect
import sys
from typing import Any, Literal

import torch
from torch import Tensor

from trainfit.virtual.trace.storages import UNKNOWN, LiveStorages
from trainfit.virtual.trace.tensors import tensors_of

Kind = Literal["step", "evaluation", "generation"]
INTEGERS, FLOATS = 1, 2
"""How one pass reads another's results; both bits where it does both."""
NONE: frozenset[int] = frozenset()
EMBEDDING = "aten::embedding"


class Pass:
    """One call of an outermost module."""

    __slots__ = (
        "has_grad", "has_parameters", "is_chained", "module", "nodes", "number", "parents", "reaches",
        "samples", "tokens",
    )  # fmt: skip

    def __init__(self, number: int, module: int, *, has_grad: bool, has_parameters: bool):
        self.number, self.module = number, module
        self.has_grad, self.has_parameters = has_grad, has_parameters
        self.parents: dict[int, int] = {}
        """Number of a pass whose results it reads -> INTEGERS, FLOATS or both."""
        self.reaches = 0
        """How its results reach a backward: FLOATS, INTEGERS alone, or not."""
        self.nodes = range(0)
        """Sequence numbers of the nodes of autograd's graph that it made."""
        self.is_chained = False
        """It samples a token for another pass of its module, or reads such a token."""
        self.tokens = self.samples = 0
        """Number of ids that its first embedding looks up; length of its first input's first dimension."""

    @property
    def is_trained(self) -> bool:
        """Whether it has gradients and its floats reach a backward. Sampling may leave gradients on."""
        return self.has_grad and self.reaches == FLOATS

    @property
    def kind(self) -> Kind:
        """The phase that it belongs to, known when the trace has ended."""
        if self.reaches == FLOATS or (self.reaches and not self.is_chained):
            return "step"
        return "generation" if self.is_chained else "evaluation"


class Passes:
    """Follows the results of passes through the operations that a tracer records."""

    def __init__(self, live: LiveStorages):
        self._live = live
        self.all: list[Pass] = []
        self.running: Pass | None = None
        self._first_nodes: list[int] = []
        """By number of a pass: autograd's sequence number when it began."""
        self._sources: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        """Index of a storage -> the passes whose floating-point results it depends on, and all that it
        depends on."""
        self._num_storages = 0
        """Storages in the ledger when the running pass began."""

    def ran_without_grad(self, module: torch.nn.Module, *, before: int) -> bool:
        """Return whether one of the first passes was one of a module without gradients."""
        return any(one.module == id(module) and not one.has_grad for one in self.all[:before])

    def has_other_kinds(self) -> bool:
        """Return whether a pass without gradients so far is part of no step."""
        self.resolve()
        needed = {one.module for one in self.all if one.kind == "step" and not one.has_grad}
        return any(
            one.kind != "step" and one.has_parameters and not one.has_grad
            and (one.is_chained or one.module not in needed)
            for one in self.all
        )  # fmt: skip

    def begin(self, module: torch.nn.Module) -> Pass:
        """Begin a pass of an outermost module, and return it."""
        has_parameters = next(module.parameters(), None) is not None
        self.running = Pass(
            len(self.all),
            id(module),
            has_grad=torch.is_grad_enabled(),
            has_parameters=has_parameters,
        )
        self.running.nodes = range(_sequence_number(), sys.maxsize)
        self.all.append(self.running)
        self._first_nodes.append(self.running.nodes.start)
        self._num_storages = len(self._live.ledger.storages)
        return self.running

    def end(self) -> None:
        """End the running pass."""
        if self.running is None:
            return
        self.running.nodes = range(self.running.nodes.start, _sequence_number())
        self.running = None

    def compiled(self, inputs: Any, output: Any) -> None:
        """Follow a call of compiled code, whose operations are not recorded one by one."""
        tensors, one = _local(tensors_of(inputs)), self.running
        if one is None:
            self._mark(_local(tensors_of(output)), *self._sources_of(tensors))
            return
        self._note_parents(one, tensors)
        self._mark(_local(tensors_of(output)), *self._of(one))
        for t in tensors:
            if t.dtype in (torch.int32, torch.int64):
                self._note_tokens(one, t)
            else:
                self._note_samples(one, t)

    def recorded(self, func: Any, args: Any, kwargs: Any, out: Any, num_storages: int) -> None:
        """Follow a recorded operation.

        Args:
            num_storages: storages in the ledger before it; those of later indices are its results.
        """
        running = self.running
        if not self.all:
            return
        reads = tensors_of((args, kwargs))
        if running is not None:
            self._note_parents(running, reads)
            if not running.tokens:
                self._note_inputs(running, func, args, reads)
            floats, every = self._of(running)
        else:
            floats, every = self._sources_of(reads)
            if not every:
                return
        if func._schema.is_mutable:
            self._mark(tensors_of(out) or reads, floats, every)
        else:
            fresh = [t for t in tensors_of(out) if self._live.index_of(t) >= num_storages]
            self._mark(fresh, floats, every)

    def backward_begins(self, roots: Any) -> None:
        """Note from which passes the tensors come that a backward starts from."""
        floats, every = self._sources_of(_local(tensors_of(roots)))
        for number in every:
            how = FLOATS if number in floats else INTEGERS
            self.all[number].reaches = max(self.all[number].reaches, how)

    def node_runs(self, node: Any) -> None:
        """Note that a node of autograd's graph runs: the pass that made it is differentiated."""
        if node is None or hasattr(node, "variable"):
            return
        number = node._sequence_nr()
        at = bisect.bisect_right(self._first_nodes, number) - 1
        if at >= 0 and number in self.all[at].nodes:
            self.all[at].reaches = FLOATS

    def resolve(self) -> None:
        """Pass on to each pass's parents how it reaches a backward; find chains of sampled tokens."""
        for one in reversed(self.all):
            for number, how in one.parents.items():
                parent = self.all[number]
                parent.reaches = max(parent.reaches, min(how & FLOATS or INTEGERS, one.reaches))
            one.is_chained = False
        for one in self.all:
            for number, how in one.parents.items():
                parent = self.all[number]
                is_trained = one.is_trained or parent.is_trained
                if how & INTEGERS and parent.module == one.module and not is_trained:
                    one.is_chained = parent.is_chained = True

    def _of(self, one: Pass) -> tuple[frozenset[int], frozenset[int]]:
        """Return the sources of a tensor that a pass computes."""
        own = frozenset((one.number,))
        return own, own

    def _note_parents(self, one: Pass, reads: list[Tensor]) -> None:
        for t in reads:
            floats, every = self._sources.get(self._live.index_of(t), (NONE, NONE))
            for number in every:
                if number != one.number:
                    how = FLOATS if number in floats else INTEGERS
                    one.parents[number] = one.parents.get(number, 0) | how

    def _note_inputs(self, one: Pass, func: Any, args: Any, reads: list[Tensor]) -> None:
        if func._schema.name == EMBEDDING:
            self._note_tokens(one, args[1])
            return
        for t in reads:
            if t.is_floating_point():
                self._note_samples(one, t)

    def _note_tokens(self, one: Pass, ids: Tensor) -> None:
        """Count ids [batch, sequence] or [sequence]; after float samples 1-D ids are labels, not counted."""
        if one.tokens or not self._is_input(ids) or not ids.dim() or (one.samples and ids.dim() == 1):
            return
        one.tokens, one.samples = ids.numel(), ids.shape[0] if ids.dim() > 1 else 0

    def _note_samples(self, one: Pass, t: Tensor) -> None:
        if not one.samples and not one.tokens and t.dim() > 1 and self._is_input(t):
            one.samples = t.shape[0]

    def _is_input(self, t: Tensor) -> bool:
        """Return whether a tensor was made before the running pass, and is no parameter or buffer."""
        index = self._live.index_of(t)
        return UNKNOWN < index < self._num_storages and self._live.category_of(index) != "weights"

    def _sources_of(self, tensors: list[Tensor]) -> tuple[frozenset[int], frozenset[int]]:
        floats = every = NONE
        for t in tensors:
            found = self._sources.get(self._live.index_of(t))
            if found is not None:
                floats, every = floats | found[0], every | found[1]
        return floats, every

    def _mark(self, tensors: list[Tensor], floats: frozenset[int], every: frozenset[int]) -> None:
        for t in tensors:
            index = self._live.index_of(t)
            if index == UNKNOWN or self._live.category_of(index) == "weights":
                continue
            known = self._sources.get(index, (NONE, NONE))
            mine = floats if t.is_floating_point() or t.is_complex() else NONE
            self._sources[index] = known[0] | mine, known[1] | every


def _local(tensors: list[Tensor]) -> list[Tensor]:
    """Return this rank's parts of DTensors."""
    return [getattr(t, "_local_tensor", t) for t in tensors]


def _sequence_number() -> int:
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]
