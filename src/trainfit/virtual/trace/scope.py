"""Attribute each operation to a module, a group of layers and a phase.

In the forward the scope is the innermost running module's. In the backward it follows from the sequence
number of autograd's current node, as modules' first and last numbers are recorded in the forward.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from trainfit.ledger.ledger import FIRST, GROUPS_PER_RUN, LAST, MIDDLE, NO_LAYER, part_of
from trainfit.virtual.trace.exclusive import chosen_by_thread
from trainfit.virtual.trace.observer import Observer


class Scope(NamedTuple):
    """Module, group of layers and phase of an operation."""

    module: str
    """Dotted path."""
    path: str
    """The path with the layer's number replaced by its name within a group: the same in each group."""
    group: int
    owned: bool = False
    """True in the optimizer, where an operation belongs to the parameter that it updates."""
    recomputing: bool = False
    in_autograd: bool = False
    """Runs in autograd's thread, which has its own library handles on CUDA."""
    updating: bool = False
    """Runs in a hook of an accumulated gradient, such as an optimizer in the backward."""


NO_SCOPE = Scope("", "", NO_LAYER)


class LayerGroups(NamedTuple):
    """First, middle and last group of one run of equal layers in a trimmed ModuleList."""

    name: str
    """The list's dotted name."""
    num_first: int
    num_middle: int
    period: int
    run: int = 0
    start: int = 0
    """Index of the run's first layer in the trimmed list."""
    stop: int | None = None
    """Index after its last layer; None: the list's end."""

    def has(self, layer: int) -> bool:
        """Return whether the layer at this index of the trimmed list is in the run."""
        return self.start <= layer and (self.stop is None or layer < self.stop)

    def locate(self, layer: int) -> tuple[int, str]:
        """Return the group of the layer at this index of the trimmed list, and its name within the group."""
        part, name = self._part(layer - self.start)
        return self.run * GROUPS_PER_RUN + part, f"R{self.run}.{name}" if self.run else name

    def _part(self, layer: int) -> tuple[int, str]:
        if layer < self.num_first:
            from_end = layer - self.num_first
            return FIRST, f"L{from_end % self.period}" if from_end >= -self.period else f"lead{layer}"
        if layer < self.num_first + self.num_middle:
            return MIDDLE, f"L{layer - self.num_first}"
        offset = layer - self.num_first - self.num_middle
        return LAST, f"L{offset}" if offset < self.period else f"tail{offset}"


def part_of_module(name: str, groups: list[LayerGroups]) -> int | None:
    """Return FIRST, MIDDLE or LAST for a module of those groups, by its dotted name; None for any other."""
    scope = ScopeTracker.locate(name, groups)
    # Layers before and after those that repeat are in the first and last group, too.
    if scope.group == NO_LAYER or ".lead" in scope.path or ".tail" in scope.path:
        return None
    return part_of(scope.group)


class ScopeTracker:
    """Tracks the scope of the running operation. Enter it around a step; ``bind`` the complete model.

    Args:
        observers: called before and after the forward of each outermost module.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self.observers = list(observers)
        self.phase = "init"
        self._of_module: dict[int, Scope] = {}
        self._of_parameter: dict[int, Scope] = {}
        self._bound: tuple[nn.Module, list[LayerGroups]] | None = None
        self._stack: list[Scope] = []
        self._after_layer: Scope | None = None
        self._numbers: list[int] = []
        self._marks: list[Scope] = []
        self._handles: list[Any] = []
        self.num_entered = 0
        """Module calls since the tracer last took their number."""
        self.override: Scope | None = None
        """The scope that compiled code sets; None: from hooks and autograd."""

    def bind(self, model: nn.Module, groups: list[LayerGroups]) -> None:
        """Register the scope of every module and parameter."""
        for name, module in model.named_modules():
            self._of_module[id(module)] = self.locate(name, groups)
            compiled: Any = module._compiled_call_impl
            if compiled is not None:
                module._compiled_call_impl = partial(self._call_compiled, module, compiled)
        self._bound = model, groups
        self._bind_parameters()

    def _bind_parameters(self) -> None:
        if self._bound is not None:
            model, groups = self._bound
            for name, parameter in model.named_parameters():
                self._of_parameter[id(parameter)] = self.locate(name, groups)

    def _call_compiled(
        self, module: nn.Module, compiled: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call compiled code; autograd nodes around it (a recomputed block's) are in the module's scope."""
        scope = self._of_module[id(module)]
        self._after_layer = None if scope.group == NO_LAYER else scope
        self._mark(scope)
        return compiled(*args, **kwargs)

    def of_parameter(self, parameter: torch.Tensor) -> Scope:
        """Return the scope of a parameter of the bound model."""
        return self._of_parameter.get(id(parameter), NO_SCOPE)

    @staticmethod
    def locate(name: str, groups: list[LayerGroups]) -> Scope:
        """Return the scope of a dotted name; a wrapper such as PEFT's may precede the list's name."""
        for group in groups:
            head, found, tail = name.partition(f"{group.name}.")
            if found and (not head or head.endswith(".")):
                index, _, rest = tail.partition(".")
                if not group.has(int(index)):
                    continue
                number, within = group.locate(int(index))
                return Scope(name, f"{head}{group.name}.{within}.{rest}", number)
        return Scope(name, name, NO_LAYER)

    def current(self) -> Scope:
        """Return the scope of the running operation."""
        if self.override is not None:
            return self.override
        if self._stack:
            scope = self._stack[-1]
            if scope.group == NO_LAYER and self._after_layer is not None:
                # Between two layers the loop over them still refers to the last one's results.
                scope = self._after_layer
            return scope._replace(recomputing=True, in_autograd=True) if self.phase == "backward" else scope
        if self.phase == "backward":
            return self._of_node(torch._C._current_autograd_node())
        return NO_SCOPE._replace(owned=self.phase == "optimizer")

    def owned_now(self) -> bool:
        return self.phase == "optimizer" and not self._stack

    def _of_node(self, node: Any) -> Scope:
        if node is None:
            return NO_SCOPE
        variable = getattr(node, "variable", None)
        if variable is not None:
            if id(variable) not in self._of_parameter:
                self._bind_parameters()  # FSDP2's whole parameters stand in the model while a block runs.
            return self.of_parameter(variable)._replace(in_autograd=True, updating=True)
        at = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return (self._marks[at] if at >= 0 else NO_SCOPE)._replace(in_autograd=True)

    def __enter__(self) -> "ScopeTracker":
        module = torch.nn.modules.module
        self._handles = [
            # Called by every thread's modules.
            module.register_module_forward_pre_hook(chosen_by_thread(self._begin)),
            module.register_module_forward_hook(chosen_by_thread(self._end), always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def within_compiled(self, module: nn.Module | None) -> Iterator[None]:
        """Enter a compiled module (None: a function) without the hooks, which Dynamo must not trace."""
        if module is not None:
            self._begin(module, None)
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
            if module is not None:
                self._end(module, None, None)

    @contextmanager
    def running(self, module: nn.Module) -> Iterator[None]:
        """Enter a module whose parts are called one by one, in place of its forward."""
        self._begin(module, None)
        try:
            yield
        finally:
            self._end(module, None, None)

    def _begin(self, module: nn.Module, _: Any) -> None:
        self.num_entered += 1
        if not self._stack:
            for observer in self.observers:
                observer.forward_begins(module)
        scope = self._of_module.get(id(module), self._stack[-1] if self._stack else NO_SCOPE)
        self._after_layer = None
        self._stack.append(scope)
        self._mark(scope)

    def _end(self, module: nn.Module, _: Any, __: Any) -> None:
        if not self._stack:
            return
        scope = self._stack.pop()
        if scope.group != NO_LAYER and self._stack and self._stack[-1].group == NO_LAYER:
            self._after_layer = scope
        self._mark(self._after_layer or (self._stack[-1] if self._stack else NO_SCOPE))
        if not self._stack:
            self._after_layer = None
            for observer in self.observers:
                observer.forward_ended()

    def _mark(self, scope: Scope) -> None:
        number = torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]
        if self._numbers and self._numbers[-1] == number:
            self._marks[-1] = scope
        else:
            self._numbers.append(number)
            self._marks.append(scope)
