"""Steps and phases of user code, and the owners of its parameters, gradients and optimizer states.

A call of an outermost module begins a forward, autograd's engine a backward, an optimizer's ``step`` an
update. The first optimizer that steps counts the steps. Forwards that no backward needs (passes.py), and the
writing of checkpoints, are phases outside the step (other_phases.py).
"""

import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trainfit.ledger.ledger import Segment
from trainfit.user.loops import LoopWatch
from trainfit.user.other_phases import OtherPhase, SegmentStart, bytes_of, kinds_of, other_phases, scorings
from trainfit.user.passes import Passes
from trainfit.user.placement import is_device
from trainfit.user.tracer import UserTracer
from trainfit.virtual.trace.exclusive import chosen_by_thread
from trainfit.virtual.trace.observer import Observer
from trainfit.virtual.trace.scope import NO_SCOPE


class TraceComplete(BaseException):
    """Ends the traced callable; a BaseException, so that its ``except Exception`` blocks do not catch it."""


LOOK_ON_PASSES, LOOK_ON_S = 2000, 20.0
"""Limits, in forwards and in seconds, up to which an evaluation after the last step is followed."""
LOOK_AHEAD_STEPS, LOOK_AHEAD_S = 100, (3.0, 20.0)
"""Limits of the wait for code that evaluates: steps, and seconds at least and at most. Between these, the
wait is as long as the steps before took."""


class StepFollower(Observer):
    """Tracks the phases, and raises ``TraceComplete`` at the training forward after ``max_steps`` steps.

    Args:
        evaluates_at: file and line of code that evaluates. If no step reached it, the trace goes on for a
            while.
        data_ranks_of: returns the number of ranks that have inputs of their own for a module; 0: unknown.
    """

    def __init__(
        self,
        max_steps: int,
        evaluates_at: str = "",
        data_ranks_of: Callable[[nn.Module], int] = lambda module: 1,
    ):
        self._evaluates_at, self._began, self._ahead_since = evaluates_at, 0.0, 0.0
        self._max_steps, self._data_ranks_of = max_steps, data_ranks_of
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
        self.data_ranks = 0
        self._grad_was_enabled = True
        self._state_read = -1
        """Segment that began when a state dict was read, and nothing was computed since; -1: none."""
        self._looked_on, self._looked_on_since = 0, 0.0
        self._loops = LoopWatch()

    def attach(self, tracer: Any) -> None:
        super().attach(tracer)
        self._tracer: UserTracer = tracer
        self._scopes, self.notes = tracer.scopes, self._tracer.notes
        self.passes = Passes(tracer.live)

    def __enter__(self) -> "StepFollower":
        self._handles = [
            register_optimizer_step_pre_hook(chosen_by_thread(self._update_begins)),
            register_optimizer_step_post_hook(chosen_by_thread(self._update_ended)),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._tracer.python_calls.stop()

    def parameter_made(self, parameter: Tensor) -> None:
        """Register a new parameter."""
        if not self._ignores:
            self._parameters[id(parameter)] = weakref.ref(parameter)

    @contextmanager
    def swapped(self, parameter: Tensor) -> Iterator[None]:
        """Drop the weak reference to a parameter while its contents are swapped, then follow it again."""
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
    def engine_runs(self, roots: Any) -> Iterator[None]:
        """Track a run of autograd's engine; ``roots`` holds the tensors that it starts from."""
        if self._engine_depth == 0:
            self.passes.backward_begins(roots)
        if self._engine_depth == 0 and self._scopes.phase != "optimizer":
            self._begin("backward")
            self.has_trained = True
        self._engine_depth += 1
        try:
            yield
        finally:
            self._engine_depth -= 1

    def forward_begins(self, module: nn.Module) -> None:
        if self._engine_depth:
            return  # Recomputation.
        self._loops.forward()
        self._register(module)
        self._pass_begins(module)

    def _pass_begins(self, module: nn.Module | None) -> None:
        if not self._tracer.python_calls.start():
            self.notes.add("another profiler ran: the host's time leaves out the script's Python")
        if self._scopes.phase == "backward":
            self._num_turns += 1
        self._began = self._began or time.monotonic()
        if self._steps_begun() >= self._max_steps:
            self._look_on(module)
        if module is None or next(module.parameters(), None) is None:
            self._begin("forward")  # A loss or a metric belongs to the surrounding phase.
        else:
            self._split("forward")
        self._grad_was_enabled, self._state_read = torch.is_grad_enabled(), -1
        if module is not None:
            started = self.passes.begin(module)
            if started.has_parameters:
                self._starts[-1] = self._starts[-1]._replace(forward=started.number)

    def _look_on(self, module: nn.Module | None) -> None:
        """After the last step: follow a first evaluation, go on to code that evaluates, or end the trace."""
        now = time.monotonic()
        self._ahead_since = self._ahead_since or now
        if module is None or torch.is_grad_enabled() or self._ran_without_grad(module):
            if not self._awaits_evaluation(now):
                raise TraceComplete
            return
        self._looked_on_since = self._looked_on_since or now
        self._looked_on += 1
        if self._looked_on > LOOK_ON_PASSES or now - self._looked_on_since > LOOK_ON_S:
            self.notes.add(
                f"an evaluation after the last step was followed for {self._looked_on - 1:,} forwards"
            )
            raise TraceComplete

    def _ran_without_grad(self, module: nn.Module) -> bool:
        return self.passes.ran_without_grad(module, before=len(self.passes.all) - self._looked_on)

    def _awaits_evaluation(self, now: float) -> bool:
        """Return whether to go on after the last step, until code that evaluates is reached."""
        if not self._evaluates_at or self.passes.has_other_kinds():
            return False
        least_s, most_s = LOOK_AHEAD_S
        limit_s = min(max(least_s, self._ahead_since - self._began), most_s)
        if self._steps_begun() < self._max_steps + LOOK_AHEAD_STEPS and now - self._ahead_since < limit_s:
            return True
        self.notes.add(
            f"{self._evaluates_at} evaluates or generates, but {self._steps_begun()} steps did not reach it: "
            "no figure includes its memory and time; trace more steps, or a version that evaluates sooner"
        )
        return False

    def _steps_begun(self) -> int:
        return self._num_updates if self.has_optimizer else self._num_turns

    def forward_ended(self) -> None:
        if not self._engine_depth:
            self.passes.end()

    def record_begins(self) -> None:
        """Begin a segment where the code switches gradients off, or on again."""
        if (
            self._engine_depth
            or self.passes.running is not None
            or self._scopes.phase not in ("data", "forward")
        ):
            return
        has_grad = torch.is_grad_enabled()
        if has_grad == self._grad_was_enabled:
            return
        self._split(self._scopes.phase)
        self._grad_was_enabled = has_grad

    def recorded(self, func: Any, args: Any, kwargs: Any, out: Any, num_storages: int) -> None:
        if self._engine_depth:
            self.passes.node_runs(torch._C._current_autograd_node())
        elif self._scopes.phase != "optimizer":
            self.passes.recorded(func, args, kwargs, out, num_storages)

    def compiled_called(self, inputs: Any, output: Any) -> None:
        self.passes.compiled(inputs, output)

    def reads_unknown(self) -> None:
        self._loops.read()

    def reading_state(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``nn.Module.state_dict``, with which a segment begins: it may gather parameters."""

        def state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not args and "prefix" not in kwargs:  # Not of a submodule.
                self._state_is_read()
            return original(module, *args, **kwargs)

        return state_dict

    def _state_is_read(self) -> None:
        if len(self._starts) > 1 and not self._engine_depth and self.passes.running is None:
            self._split(self._scopes.phase)
            self._state_read = len(self._starts) - 1

    def saves(self, obj: Any) -> None:
        """Note that a checkpoint is written; computation since its state was read belongs to it."""
        num_bytes = bytes_of(obj)
        if not num_bytes or len(self._starts) == 1 or self._engine_depth or self.passes.running is not None:
            return
        if self._state_read < 0:
            self._split(self._scopes.phase)
            self._state_read = len(self._starts) - 1
        for number in range(self._state_read, len(self._starts)):
            self._starts[number] = self._starts[number]._replace(is_saved=True)
        self._starts[-1] = self._starts[-1]._replace(saved_bytes=num_bytes)
        self._split(self._scopes.phase)
        self._state_read = -1

    def replays(self, phase: str) -> None:
        """Begin a phase of a CUDA graph that is replayed; an update in it is one of the step."""
        if self._engine_depth:
            return  # The graph of a backward, in the backward.
        if phase == "forward":
            self._pass_begins(None)
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
            self.data_ranks = self._data_ranks_of(module) or self.data_ranks
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
        self.num_parameters = sum(map(_num_elements, on_device))
        self.num_trained = sum(_num_elements(p) for p in on_device if p.requires_grad)
        if len(self._starts) == 1:
            # Other tensors moved to the device before training: the first batch, targets, tables.
            self._tracer.live.categorise("activations", self._tracer.live.allocated_in(0))

    def _begin(self, phase: str) -> None:
        if phase in ("backward", "optimizer"):
            self._loops.trained()
        if self._scopes.phase != phase:
            self._split(phase)
            self._grad_was_enabled, self._state_read = True, -1

    def _split(self, phase: str) -> None:
        """Begin a segment, also one of the same phase."""
        self._tracer.begin("", phase)
        has_grad = torch.is_grad_enabled()
        self._starts.append(SegmentStart(phase, self._num_updates, self._num_turns, has_grad=has_grad))

    def num_steps(self) -> int:
        """Return the number of complete steps: updates, or turns from a backward without an optimizer."""
        if self._main_optimizer is not None:
            return min(self._num_updates, self._max_steps)
        return min(sum(start.phase == "backward" for start in self._starts), self._max_steps)

    def segments(self) -> list[Segment]:
        """Return the segments, of steps setup, first, later, steady (the last complete one) and rest.

        Those of evaluations, generations and checkpoints are of steps with these names.
        """
        whole, kinds = max(1, self.num_steps()), self._kinds()
        return [
            Segment(kinds.get(n) or self._step_of(n, start, whole), start.phase)
            for n, start in enumerate(self._starts)
        ]

    def other_phases(self) -> list[OtherPhase]:
        """Return the evaluations, generations and checkpoints in order."""
        return list(other_phases(self._starts, self._kinds(), self._number_of))

    def scorings(self) -> list[OtherPhase]:
        """Return the forwards without gradients that are part of whole steps, in order."""
        kinds, whole = self._kinds(), self.num_steps()
        return [one for one in scorings(self._starts, kinds, self._number_of) if one.step < whole]

    def step_inputs(self) -> tuple[int, int]:
        """Return the tokens and the samples of the steady step: those of the module that takes the most."""
        tokens, samples = Counter[int](), Counter[int]()
        for start, segment in zip(self._starts, self.segments(), strict=True):
            is_last = segment.step == "steady" or (self.num_steps() <= 1 and segment.step == "first")
            if start.forward >= 0 and is_last:
                one = self.passes.all[start.forward]
                if one.has_grad and one.reaches:
                    tokens[one.module] += one.tokens
                    samples[one.module] += one.samples
        return max(tokens.values(), default=0), max(samples.values(), default=0)

    def _kinds(self) -> dict[int, str]:
        if not self.has_trained:
            return {}  # Without training all code counts as the step.
        whole = self.num_steps()
        return kinds_of(self._starts, self.passes, lambda start: self._number_of(start) >= whole)

    def _number_of(self, start: SegmentStart) -> int:
        return start.num_updates if self._main_optimizer is not None else start.num_turns

    def _step_of(self, position: int, start: SegmentStart, whole: int) -> str:
        if position == 0:
            return "setup"
        number = self._number_of(start)
        if number >= whole:
            return "rest"
        return "first" if number == 0 else "steady" if number == whole - 1 else "later"


def _num_elements(parameter: Tensor) -> int:
    """Return a parameter's elements; of a packed one (bitsandbytes' Params4bit) those before packing."""
    packed = getattr(parameter, "quant_state", None)
    return parameter.numel() if packed is None else math.prod(packed.shape)
