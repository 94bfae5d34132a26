"""Order the kernels of a few layers as Inductor orders those of the whole model.

Inductor keeps, of a few topological orders of a graph's kernels, the one with the least estimated peak memory
(``torch/_inductor/memory.py``). The orders and their peaks depend on the number of layers. So the graph of
a few layers is unrolled to all of them, in sizes and dependencies alone, ordered by torch's functions, and
folded again. Its pattern is three equal slices, a layer (or a period of layers) each; the second stands for
many.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

from trainfit.ledger.ledger import FIRST, LAST, MIDDLE, RepeatError
from trainfit.virtual.trace.exclusive import replaced

OUTSIDE = -1
"""Copy number of a node outside the slices."""


class Layers(NamedTuple):
    """The repeated layers of a traced model."""

    part_of: Callable[[str], int | None]
    """Dotted name of a module -> FIRST, MIDDLE or LAST; None: in none of the three groups."""
    times: int
    """Groups that the middle one stands for."""


class Position(NamedTuple):
    """Where the program runs a kernel."""

    part: int
    """FIRST, MIDDLE or LAST; less or more for slices before and after these, in the order of the layers."""
    position: int
    """Index within the slice: the same for equal kernels of all slices."""


@contextmanager
def planned_as_whole(part_of: Callable[[Any], int | None], times: int) -> Iterator[dict[Any, Position]]:
    """Order kernels, and reuse their buffers, as Inductor does in the whole model.

    Args:
        part_of: scheduled node -> FIRST, MIDDLE, LAST or None.
        times: slices that the middle one stands for.
    Yields:
        the position of each node of a slice, filled when a graph is scheduled.
    """
    from torch._inductor import memory

    reorder: Any = memory.reorder_for_peak_memory
    estimate: Any = memory.estimate_peak_memory
    positions: dict[Any, Position] = {}
    whole: list[tuple[int, list[int]]] = []

    def ordered(nodes: list[Any], buffers: Any, fused: Any, inputs: Any, outputs: Any) -> list[Any]:
        parts = {node: part_of(node) for node in nodes}
        if MIDDLE not in parts.values():
            return reorder(nodes, buffers, fused, inputs, outputs)
        _, freeable = memory.prepare_planning_info(nodes, buffers, fused, inputs, outputs)
        slices = _slices(nodes, parts)
        unrolled = _Unrolled(nodes, slices, freeable, outputs, times)
        with replaced(memory, "prepare_planning_info", unrolled.planning_info):
            order = reorder(unrolled.nodes, unrolled.buffers, {}, inputs, unrolled.outputs)
        starts, length = unrolled.check_order(order)
        peak, live = estimate(order, unrolled.freeable, unrolled.outputs)
        kept = slice(starts[1] + length, starts[-1])  # All copies of the second slice but one.
        del order[kept], live[kept]
        whole.append((peak, live))
        folded = [node.origin for node in order]
        is_forward = parts[slices[0][0]] == FIRST
        for at in range(starts[0] % length, len(folded) - length + 1, length):
            number = (at - starts[0]) // length
            part = number if is_forward else FIRST + LAST - number
            positions.update({node: Position(part, n) for n, node in enumerate(folded[at : at + length])})
        return folded

    def estimated(nodes: list[Any], *args: Any) -> tuple[int, list[int]]:
        # Inductor's code generation calls it again, to decide which buffers to reuse.
        return whole[-1] if whole else estimate(nodes, *args)

    with (
        replaced(memory, "reorder_for_peak_memory", ordered),
        replaced(memory, "estimate_peak_memory", estimated),
    ):
        yield positions


def _slices(nodes: Sequence[Any], parts: dict[Any, int | None]) -> list[list[Any]]:
    """Cut the nodes, in order of execution, at each part's first call of a library.

    A kernel before that is fused with operations before the layer, such as the embedding.
    """
    first: dict[int, int] = {}
    for index, node in enumerate(nodes):
        if (part := parts[node]) is not None and node.is_extern():
            first.setdefault(part, index)
    starts = list(first.values())
    length = starts[1] - starts[0] if len(starts) == 3 else 0
    if not length or starts[2] - starts[1] != length or starts[2] + length > len(nodes):
        raise RepeatError("the layers' kernels are not alike")
    return [list(nodes[start : start + length]) for start in starts]


class _Node:
    """Stand-in of a scheduled node."""

    def __init__(self, origin: Any, copy: int):
        self.origin, self.copy = origin, copy
        self.name = f"{origin.get_name()}#{copy}"
        self.unmet_dependencies: list[Any] = []
        self.outputs: list[_Buffer] = []
        self.mpi_node: Any = None

    def get_name(self) -> str:
        return self.name

    def get_buffer_names(self) -> tuple[str, ...]:
        """Return the name that dependencies of other nodes on this one have."""
        return (self.name,)

    def get_outputs(self) -> "list[_Buffer]":
        return self.outputs


class _Buffer:
    """Stand-in of a scheduled buffer."""

    def __init__(self, name: str, mpi_buffer: Any):
        self.name, self.mpi_buffer = name, mpi_buffer

    def get_name(self) -> str:
        return self.name


class _Unrolled:
    """Stand-ins for a graph's nodes and buffers, those of the second slice ``times`` times.

    Copies are numbered in the order of execution: 0 is the first slice, 1 to ``times`` the second, and
    ``times`` + 1 the third.

    An example: an embedding e, three layers of two kernels each, a head h. Each kernel reads the result of
    the one before it, and ``times`` is 3::

        e   a0 b0   a1 b1   a2 b2   h

    The nodes become e, then a0#0 b0#0, a1#1 b1#1, a1#2 b1#2, a1#3 b1#3, a2#4 b2#4, then h. Kernel a1 reads
    b0, one slice before its own. In copy c it reads what is at b's position in copy c - 1: a1#1 reads b0#0,
    a1#2 reads b1#1, and a2#4 reads b1#3. Lifetimes shift likewise: a2 uses b1's result, so a1#3 uses that of
    b1#2. Inputs go by their users. A weight that only a1 reads becomes three, of copies 1 to 3. A table that
    b0, b1 and b2 read stays one, with five users.

    Raises:
        RepeatError: a tensor that differs from copy to copy is used beyond the next one.
    """

    def __init__(
        self,
        nodes: Sequence[Any],
        slices: list[list[Any]],
        freeable: dict[str, Any],
        outputs: Any,
        times: int,
    ):
        self._slices, self._times = slices, times
        self._position = {
            node: (number, position) for number, one in enumerate(slices) for position, node in enumerate(one)
        }
        start, length = nodes.index(slices[0][0]), len(slices[0])
        self._before = set(nodes[:start])
        self._stand_ins: dict[tuple[Any, int], _Node] = {}
        for node in nodes[: start + length]:
            self._add(node, 0)
        for copy in range(1, times + 1):
            for node in slices[1]:
                self._add(node, copy)
        for node in nodes[start + 2 * length :]:
            self._add(node, times + 1)
        self.nodes = list(self._stand_ins.values())
        self.buffers: dict[str, _Buffer] = {}
        self.outputs = type(outputs)()
        makers = {name: node for node in nodes for name in node.get_buffer_names()}
        for (node, copy), stand_in in self._stand_ins.items():
            home = self._slice_of(node)
            found = [makers[d.name] for d in node.unmet_dependencies if d.name in makers]
            stand_in.unmet_dependencies = [
                SimpleNamespace(name=self._earlier(other, home, copy).name) for other in found
            ]
            for buffer in node.get_outputs():
                named = self._named(buffer.get_name(), home, copy, outputs)
                self.buffers[named] = _Buffer(named, self._lifetime(buffer.mpi_buffer, home, copy))
                stand_in.outputs.append(self.buffers[named])
        self.freeable: dict[str, Any] = {}
        for name, buffer in freeable.items():
            home = self._home(buffer.mpi_buffer.succ_nodes)
            for copy in self._copies(home):
                named = self._named(name, home, copy, outputs)
                self.freeable[named] = type(buffer)(named, self._lifetime(buffer.mpi_buffer, home, copy))

    def planning_info(self, *_: Any) -> tuple[int, dict[str, Any]]:
        """Replace ``prepare_planning_info``."""
        from torch._inductor import memory

        nodes: Any = self.nodes
        buffers: Any = self.buffers
        memory.assign_memory_planning_info_for_scheduler_nodes(nodes, {}, buffers, self.freeable)
        return memory.estimate_peak_memory(nodes, self.freeable, self.outputs)[0], self.freeable

    def check_order(self, order: list[_Node]) -> tuple[list[int], int]:
        """Check that an order of the stand-ins is the same in each copy.

        Returns:
            Where each copy starts; the length of one.

        Raises:
            RepeatError: it is not.
        """
        first: dict[int, int] = {}
        for index, node in enumerate(order):
            if node.copy != OUTSIDE:
                first.setdefault(node.copy, index)
        starts = [first[copy] for copy in range(self._times + 2)]
        length = starts[1] - starts[0]
        pattern = [self._relative(node, 1) for node in order[starts[1] : starts[2]]]
        for copy in range(1, self._times + 1):
            found = order[starts[copy] : starts[copy + 1]]
            if [self._relative(node, copy) for node in found] != pattern:
                raise RepeatError("the kernels' order differs from layer to layer")
        if len(pattern) != length:
            raise RepeatError("the kernels' order differs from layer to layer")
        return starts, length

    def _relative(self, node: _Node, copy: int) -> tuple[Any, int]:
        """Return a node's position and copy relative to ``copy``: equal for equal nodes of each copy."""
        if node.copy == OUTSIDE:
            return node, 0
        return self._position[node.origin][1], node.copy - copy

    def _add(self, node: Any, copy: int) -> None:
        copy = copy if node in self._position else OUTSIDE
        self._stand_ins[node, copy] = _Node(node, copy)

    def _slice_of(self, node: Any) -> int | None:
        return self._position[node][0] if node in self._position else None

    def _copies(self, home: int | None) -> Iterable[int]:
        """Return the numbers of a slice's copies."""
        if home is None:
            return (OUTSIDE,)
        return range(1, self._times + 1) if home == 1 else (0 if home == 0 else self._times + 1,)

    def _at(self, position: int, copy: int) -> _Node:
        number = 0 if copy == 0 else 1 if copy <= self._times else 2
        return self._stand_ins[self._slices[number][position], copy]

    def _named(self, name: str, home: int | None, copy: int, outputs: Any) -> str:
        """Return the name of a buffer's copy, and note whether it is an output."""
        named = f"{name}#{copy}" if home == 1 else name
        if name in outputs:
            self.outputs.add(named)
        return named

    def _earlier(self, other: Any, home: int | None, copy: int) -> _Node:
        """Return the stand-in that a node of slice ``home`` depends on in its copy."""
        if other not in self._position:
            return self._stand_ins[other, OUTSIDE]
        number, position = self._position[other]
        if home is None:
            return self._at(position, next(iter(self._copies(number))))
        if home - number not in (0, 1):
            raise RepeatError("a layer reads a result of a layer other than the one before it")
        return self._at(position, copy + number - home)

    def _home(self, users: Iterable[Any]) -> int | None:
        """Return the slice that an input belongs to; None: to none, or to all."""
        positions = [self._position.get(user) for user in users]
        numbers = {position: set[int]() for _, position in filter(None, positions)}
        for number, position in filter(None, positions):
            numbers[position].add(number)
        shared = all(len(found) == len(self._slices) for found in numbers.values())
        if shared or any(user in self._before for user in users):
            return None
        return min(number for number, _ in filter(None, positions))

    def _lifetime(self, lifetime: Any, home: int | None, copy: int) -> Any:
        """Return a buffer's planning info with the stand-ins of its users."""
        users = {
            one.name: type(value)(self._users(value, home, copy))
            for one in dataclasses.fields(lifetime)
            if not isinstance(value := getattr(lifetime, one.name), int)
        }
        return dataclasses.replace(lifetime, **users)

    def _users(self, users: Iterable[Any], home: int | None, copy: int) -> Iterator[_Node]:
        by_position: dict[int, set[int]] = {}
        for user in users:
            if user not in self._position:
                if home in (0, 1):
                    raise RepeatError("a layer's result is used outside the layers")
                yield self._stand_ins[user, OUTSIDE]
                continue
            number, position = self._position[user]
            if home is None:
                by_position.setdefault(position, set()).add(number)
            elif number - home not in (0, 1):
                raise RepeatError("a layer reads a result of a layer other than the one before it")
            else:
                yield self._at(position, copy + number - home)
        for position, numbers in by_position.items():
            if len(numbers) not in (1, len(self._slices)) or (len(numbers) == 1 and numbers != {0}):
                raise RepeatError("layers read different inputs")
            for each in range(self._times + 2) if len(numbers) > 1 else (0,):
                yield self._at(position, each)
