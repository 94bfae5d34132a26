"""Steps and phases of user code, and the owners of its parameters, gradients and optimizer states.

A call of an outermost module begins a forward, autograd's engine a backward, an optimizer's ``step`` an
update. The first optimizer that steps counts the steps.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trainfit.ledger.ledger import Segment
from trainfit.virtual.trace.exclusive import chosen_by_thread
from trainfit.virtual.trace.scope import NO_SCOPE, ScopeTracker
from trainfit.virtual.user.placement import is_device
from trainfit.virtual.user.tracer import UserTracer


class TraceComplete(BaseException):
    """Ends the traced callable; a BaseException, so that its ``except Exception`` blocks do not catch it."""


class SegmentStart(NamedTuple):
    """Phase of a segment, and the updates and backward-to-forward turns before it."""

    phase: str
    num_updates: int
    num_turns: int


class StepFollower:
    """Tracks the phases, and raises ``TraceComplete`` at the first forward after ``max_steps`` steps."""

    def __init__(self, tracer: UserTracer, scopes: ScopeTracker, max_steps: int):
        self._tracer, self._scopes, self._max_steps = tracer, scopes, max_steps
        self._starts = [SegmentStart("init", 0, 0)]
        self._parameters: dict[int, weakref.ref[Tensor]] = {}
        """By the parameter's ``id``."""
        self._watched: set[int] = set()
        self._known_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._main_optimizer: int | None = None
        self._num_updates = self._num_turns = self._engine_depth = 0
        self._ignores = False
        self._handles: list[Any] = []
        self.has_trained = False
        self.has_optimizer = False  # Steps are updates rather than backwards
        self.num_parameters = self.num_trained = 0
        """Elements of all and of trainable parameters on the device at the last call of a module."""
        scopes.on_outermost = self._forward_begins

    def __enter__(self) -> "StepFollower":
        self._handles = [
            register_optimizer_step_pre_hook(chosen_by_thread(self._update_begins)),
            register_optimizer_step_post_hook(chosen_by_thread(self._update_ended)),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def parameter_made(self, parameter: Tensor) -> None:
        """Register a new parameter."""
        if not self._ignores:
            self._parameters[id(parameter)] = weakref.ref(parameter)

    @contextmanager
    def swapped(self, parameter: Tensor) -> Iterator[None]:
        """Have no weak reference to a parameter whose contents are swapped inside, and watch it anew."""
        is_known = self._parameters.pop(id(parameter), None) is not None
        with self.ignored_parameters():
            yield
        if is_known:
            self._parameters[id(parameter)] = weakref.ref(parameter)
        self._watched.discard(id(parameter))

    @contextmanager
    def ignored_parameters(self) -> Iterator[None]:
        """Do not register the parameters made inside."""
        self._ignores = True
        try:
            yield
        finally:
            self._ignores = False

    @contextmanager
    def engine_runs(self) -> Iterator[None]:
        """Track a run of autograd's engine."""
        if self._engine_depth == 0 and self._scopes.phase != "optimizer":
            self._begin("backward")
            self.has_trained = True
        self._engine_depth += 1
        try:
            yield
        finally:
            self._engine_depth -= 1

    def _forward_begins(self, module: nn.Module) -> None:
        if self._engine_depth:
            return  # Recomputation.
        self._register(module)
        self._pass_begins()

    def _pass_begins(self) -> None:
        if self._scopes.phase == "forward":
            return
        if self._scopes.phase == "backward":
            self._num_turns += 1
        if (self._num_updates if self.has_optimizer else self._num_turns) >= self._max_steps:
            raise TraceComplete
        self._begin("forward")

    def replays(self, phase: str) -> None:
        """Begin a phase of a CUDA graph that is replayed; an update in it is one of the step."""
        if self._engine_depth:
            return  # The graph of a backward, in the backward.
        if phase == "forward":
            self._pass_begins()
            return
        self._begin(phase)
        if phase == "optimizer":
            self._num_updates += 1

    def _update_begins(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if self._engine_depth:
            return None  # An optimizer in the backward.
        self._begin("optimizer")
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 and callable(args[1]) else None)
        if closure is None:
            return None

        def evaluated() -> Any:
            loss = closure()
            self._begin("optimizer")
            return loss

        return (args[:1], {**kwargs, "closure": evaluated})

    def _update_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    self._tracer.live.own(value, "optimizer", NO_SCOPE)
        if self._main_optimizer is None:
            self._main_optimizer = id(optimizer)
        if self._main_optimizer == id(optimizer):
            self._num_updates += 1
        if not self._engine_depth:
            self._begin("data")

    def _register(self, module: nn.Module) -> None:
        if module not in self._known_modules:
            self._known_modules.add(module)
            self._scopes.bind(module, [])
        held = [p for ref in self._parameters.values() if (p := ref()) is not None]
        self._parameters = {id(p): weakref.ref(p) for p in held}
        on_device = [p for p in held if is_device(p)]
        for tensor in (*on_device, *filter(is_device, module.buffers())):
            self._tracer.live.own(tensor, "weights", NO_SCOPE)
        for parameter in on_device:
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                self._tracer.live.watch_gradient(parameter, NO_SCOPE)
        self.num_parameters = sum(p.numel() for p in on_device)
        self.num_trained = sum(p.numel() for p in on_device if p.requires_grad)
        if len(self._starts) == 1:
            # Other tensors moved to the device before training: the first batch, targets, tables.
            self._tracer.live.categorise("activations", self._tracer.live.allocated_in(0))

    def _begin(self, phase: str) -> None:
        if self._scopes.phase == phase:
            return
        self._tracer.begin("", phase)
        self._starts.append(SegmentStart(phase, self._num_updates, self._num_turns))

    def num_steps(self) -> int:
        """Return the number of complete steps: updates, or backwards without an optimizer."""
        if self._main_optimizer is not None:
            return self._num_updates
        return sum(start.phase == "backward" for start in self._starts)

    def segments(self) -> list[Segment]:
        """Return the segments, of steps setup, first, later, steady (the last complete one) and rest."""
        whole = max(1, self.num_steps())
        return [Segment(self._step_of(n, start, whole), start.phase) for n, start in enumerate(self._starts)]

    def _step_of(self, position: int, start: SegmentStart, whole: int) -> str:
        if position == 0:
            return "setup"
        number = start.num_updates if self._main_optimizer is not None else start.num_turns
        if number >= whole:
            return "rest"
        return "first" if number == 0 else "steady" if number == whole - 1 else "later"
