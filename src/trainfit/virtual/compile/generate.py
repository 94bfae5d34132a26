"""Generate Inductor's program for one graph of AOTAutograd.

Torch's ``codegen_and_compile`` runs up to the compilation of kernels; the program calls ``_at(n)`` before
kernel n.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import fx

from trainfit.virtual.compile.cuda_device import as_cuda, move_graph, moved_tensor
from trainfit.virtual.compile.unrolled import Layers, Position, planned_as_whole
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.forked import begin, can_fork
from trainfit.virtual.trace.exclusive import replaced

AT = "_at"
"""Name of the function that the program calls before each kernel."""
LONG_ROW, ROW_MULTIPLE = 1024, 128
"""Rows that Inductor pads are at least this long and no multiple of this (``padding_stride_threshold``,
``padding_alignment_bytes``)."""
SELF = "L['self']"
"""Dynamo's name of the compiled module."""


class OtherStridesError(Exception):
    """A forward's outputs have other strides than those that its backward was lowered with."""


class Kernel(NamedTuple):
    """A scheduled kernel, fused or extern."""

    num_bytes: int
    """Read and written, each buffer at most once."""
    modules: tuple[str, ...]
    """Dotted names of its operations' modules, within the compiled module."""
    recomputes: bool
    """All its operations recompute the forward in the backward."""
    node: str | None = None
    """The graph's node of an extern kernel."""
    position: Position | None = None
    """In a program of repeated layers, where the kernel runs; None: outside the repeated layers."""


Written = tuple[str, tuple[Kernel, ...]]
"""A program's text and kernels."""


@dataclass(frozen=True)
class Source:
    """A program of Inductor."""

    written: Callable[[], Written]
    """Returns its text and kernels, once. They are written while this process goes on."""
    constants: dict[str, torch.Tensor]
    graph: fx.Graph | None = None
    """The lowered graph, with Inductor's rewrites."""


def generate(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    gpu: GpuTraits | None,
    graph_kwargs: dict[str, Any],
    runnable: Callable[[Source], Callable[[list[Any]], Any]],
    layers: Layers | None = None,
    *,
    ahead: bool = False,
) -> Any:
    """Return torch's compiled graph with the callable ``runnable(source)``.

    Args:
        gm, example_inputs: on the CPU, from AOTAutograd; for a GPU ``gm`` is moved to CUDA in place.
        gpu: None for a CPU program.
        graph_kwargs: of ``compile_fx``'s inner compiler.
        layers: repeated layers of the compiled module, whose kernels are ordered as in the whole model.
        ahead: a forward may be lowered in a fork, while its backward is lowered with the strides that its
            outputs are likely to have. Reading the source raises OtherStridesError if they have others.

    Raises:
        RepeatError: the layers' kernels differ.
    """
    from torch._inductor.compile_fx import _InProcessFxCompile
    from torch._inductor.debug import DebugContext
    from torch._inductor.utils import BoxedBool, set_tracing_context_output_strides
    from torch._inductor.virtualized import V

    settings: Any = {**graph_kwargs, "cudagraphs": BoxedBool(False)}
    inputs = list(example_inputs)
    with ExitStack() as stack:
        if gpu is not None:
            stack.enter_context(as_cuda(gpu))
            with V.fake_mode:
                inputs = [moved_tensor(value) for value in inputs]
            move_graph(gm.graph)
        stack.enter_context(V.set_debug_handler(DebugContext()))
        stack.enter_context(_stopping_at_the_source(runnable, layers, ahead=ahead))
        compiled: Any = _InProcessFxCompile().codegen_and_compile(gm, inputs, [], settings)
    set_tracing_context_output_strides(inputs, compiled)
    return compiled


@contextmanager
def _stopping_at_the_source(
    runnable: Callable[[Source], Callable[[list[Any]], Any]], layers: Layers | None, *, ahead: bool
) -> Iterator[None]:
    from torch._inductor.codegen import common
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    kernels: list[Kernel] = []
    positions: dict[Any, Position] = {}
    enter_context = Scheduler.enter_context

    def entered(self: Any, node: Any) -> None:
        enter_context(self, node)
        V.graph.wrapper_code.writeline(f"{AT}({len(kernels)})")
        kernels.append(_kernel(node, V.graph.is_backward)._replace(position=positions.get(node)))

    def write(graph: Any) -> Written:
        return graph.codegen()[0].value, tuple(kernels)

    def lower(graph: Any, *inputs: Any) -> Any:
        nonlocal written
        outputs = graph.module.graph.output_node().args[0]
        is_forward = type(graph) is GraphLowering and not (graph.is_backward or graph.is_inference)
        if not (ahead and is_forward and can_fork() and _keep_strides(outputs)):
            return run(graph, *inputs)

        written = _lowered_ahead(graph, lambda: run(graph, *inputs), write)
        graph.graph_outputs = []  # Without strides the backward takes those of the traced tensors.
        return None

    def source_only(graph: Any) -> Any:
        if (read := written) is None:
            if graph.is_inference or not can_fork():
                found = write(graph)
                read = lambda: found  # noqa: E731
            else:
                read = _begin_writing(graph, partial(write, graph))
        source = Source(read, dict(graph.constants), graph.module.graph)
        return SimpleNamespace(call=runnable(source), runner=None)

    run = GraphLowering.run
    written: Callable[[], Written] | None = None
    with ExitStack() as stack:
        stack.enter_context(replaced(Scheduler, "enter_context", entered))
        stack.enter_context(replaced(GraphLowering, "run", lower))
        stack.enter_context(replaced(GraphLowering, "compile_to_module", source_only))
        if hasattr(common, "DtypePropagationOpsHandler"):
            # Inductor sets up the attributes of this object again for each operation of a kernel.
            dtypes = DtypePropagationOpsHandler()
            stack.enter_context(replaced(common, "DtypePropagationOpsHandler", lambda: dtypes))
        if layers is not None:
            part_of = partial(_part_of, layers=layers)
            positions = stack.enter_context(planned_as_whole(part_of, layers.times))
        yield


def _begin_writing(graph: Any, function: Callable[[], Any]) -> Callable[[], Any]:
    """Begin to write a graph's source, and return the function that waits for it."""
    graph.scheduler = SimpleNamespace(nodes=[])  # Torch logs its collectives.
    return begin(function)


def _lowered_ahead(
    graph: Any, lower: Callable[[], None], write: Callable[[Any], Written]
) -> Callable[[], Written]:
    """Begin to lower a forward in a fork and to write its source; return the function that waits for it.

    The returned function raises OtherStridesError if the forward's outputs have other strides than the
    traced ones.
    """
    outputs = graph.module.graph.output_node().args[0]

    def lower_and_write() -> Written | None:
        lower()
        strides = [_strides_of_lowered(each) for each in graph.graph_outputs]
        as_traced = strides == [_strides_of(each) for each in outputs]
        return write(graph) if as_traced and not graph.constants else None

    found = _begin_writing(graph, lower_and_write)

    def read() -> Written:
        if (program := found()) is None:
            raise OtherStridesError
        return program

    return read


def _keep_strides(outputs: Sequence[Any]) -> bool:
    """Return whether a forward's outputs are likely to keep their strides: Inductor pads long rows."""
    strides = [stride for output in outputs for stride in _strides_of(output) or ()]
    return all(isinstance(each, int) and (each < LONG_ROW or each % ROW_MULTIPLE == 0) for each in strides)


def _strides_of(output: Any) -> tuple[Any, ...] | None:
    value = output.meta.get("val") if isinstance(output, fx.Node) else None
    return tuple(value.stride()) if isinstance(value, torch.Tensor) else None


def _strides_of_lowered(output: Any) -> tuple[Any, ...] | None:
    return tuple(map(int, output.get_stride())) if output.has_tensor_output() else None


def _part_of(node: Any, layers: Layers) -> int | None:
    """Return the part of the layers that a scheduled node's last operation belongs to."""
    modules = _kernel(node, is_backward=False).modules
    return layers.part_of(modules[-1]) if modules else None


def _kernel(node: Any, is_backward: bool) -> Kernel:
    origins = [
        origin for part in node.get_nodes() if part.node is not None for origin in part.node.get_origins()
    ]
    # An extern kernel's first origin is its own operation; the others compute its inputs.
    own = origins[:1] if node.is_extern() else origins
    modules = tuple(dict.fromkeys(name for origin in own if (name := _module_of(origin)) is not None))
    recomputes = is_backward and bool(origins) and all(_is_forwards(origin) for origin in origins)
    extern = own[0].name if node.is_extern() and own else None
    return Kernel(_num_bytes(node), modules, recomputes, extern)


def _num_bytes(node: Any) -> int:
    """Return the bytes that a kernel reads and writes, of each buffer at most its size.

    Inductor counts whole buffers for fused nodes, also where their parts read a slice, or rows by index.
    """
    from torch._inductor.scheduler import FusedSchedulerNode

    whole: dict[str, int] = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    if not isinstance(node, FusedSchedulerNode):
        return int(sum(whole.values()))
    accessed = dict.fromkeys(whole, 0)
    for part in node.get_nodes():
        own = part.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
        for name, num_bytes in own.items():
            if name in accessed:
                accessed[name] += num_bytes
    return int(sum(min(num_bytes, whole[name]) for name, num_bytes in accessed.items()))


def _is_forwards(node: fx.Node) -> bool:
    """Return whether a node is tagged as forward; recomputed random operations have lost the tag."""
    return node.meta.get("partitioner_tag") == "is_forward" or str(node.target) == "run_with_rng_state"


def _module_of(node: fx.Node) -> str | None:
    """Return the dotted name of the innermost module of a node or of its forward."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    path, _ = list(stack.values())[-1]
    return path.removeprefix(SELF).removeprefix(".")
