"""Streams, events and CUDA graphs of the virtual GPU: nothing waits, and each stream has a pool of memory."""

import itertools
from collections.abc import Callable
from typing import Any

import torch

from trainfit.ledger.ledger import Op
from trainfit.user.placement import CPU, CUDA, names_cuda
from trainfit.user.steps import StepFollower
from trainfit.user.tracer import UserTracer

Functions = dict[str, Any]
GRAPHS = "CUDA graphs: memory that a graph's private pool keeps is modelled as a stream's of its own"
TIMES = "times between CUDA events are 1 ms: the code is not timed"
_handles = itertools.count(1)


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def no_ops(names: str) -> Functions:
    """Return functions without effect."""
    return dict.fromkeys(names.split(), nothing)


class NoContext:
    """A context manager without effect."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Event(NoContext):
    """An event of the virtual GPU; times are unknown, so 1 ms is between any two."""

    cuda_event = event_id = 0
    device = CUDA

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: Any) -> Any:
        return cls()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        return 1.0

    def ipc_handle(self) -> bytes:
        return b""

    record = wait = synchronize = nothing


class Stream(Event):
    """A stream of the virtual GPU: its operations allocate from a pool of its own."""

    device_index, device_type, priority = 0, 1, 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any):
        self.priority = priority
        self.cuda_stream = self.stream_id = 0 if device is DEFAULT else next(_handles)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5  # Of the GPUs since Volta (cudaDeviceGetStreamPriorityRange)

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def __enter__(self) -> Any:
        self._entered: Any = torch.cuda.stream(self)  # pyright: ignore[reportArgumentType]
        self._entered.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.__exit__()

    wait_event = wait_stream = nothing


DEFAULT = object()
"""The device of the default stream."""


class Streams:
    """The default stream of the virtual GPU, and those that the code entered."""

    def __init__(self) -> None:
        self.default = Stream(DEFAULT)
        self.entered = [self.default]

    def current(self) -> Stream:
        """Return the running stream."""
        return self.entered[-1]


def stream_functions(streams: Streams, host_waits: Callable[[], None]) -> Functions:
    """Return the functions and classes of streams in ``torch.cuda``.

    Args:
        streams: those of this trace.
        host_waits: called where the host waits for the GPU.
    """
    entered = streams.entered

    class StreamContext(NoContext):
        """``torch.cuda.stream(s)``; a type, for an isinstance check of PyTorch's compiler."""

        def __init__(self, stream: Any = None):
            self.stream = stream

        def __enter__(self) -> Any:
            entered.append(self.stream or entered[-1])
            return self

        def __exit__(self, *_: object) -> None:
            entered.pop()

    def enter(stream: Any) -> None:
        entered[-1] = stream or entered[-1]

    return no_ops("_sleep") | {
        "synchronize": lambda device=None: host_waits(),
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "set_stream": enter,
        "current_stream": lambda device=None: streams.current(),
        "default_stream": lambda device=None: streams.default,
        "get_stream_from_external": lambda data_ptr, device=None: Stream(device),
    }


def graph_functions(tracer: UserTracer, steps: StepFollower) -> Functions:
    """Return the functions and classes of CUDA graphs in ``torch.cuda``; PyTorch's ``graph`` uses them."""

    class CUDAGraph(Graph):
        """A graph of this trace."""

        _tracer, _steps = tracer, steps

    return {
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": lambda: (0, next(_handles)),
        "is_current_stream_capturing": lambda: bool(Graph.num_capturing),
    }


class Graph:
    """A CUDA graph: its operations run while they are captured, and each replay records them again.

    Allocations are those of the capture; a replay takes no memory.
    """

    num_capturing = 0
    _tracer: UserTracer
    _steps: StepFollower

    def __init__(self, keep_graph: bool = False, **_: Any):
        self._pool = (0, next(_handles))
        self._first, self._ops = 0, list[tuple[str, Op]]()

    def capture_begin(self, pool: Any = None, **_: Any) -> None:
        """Begin a capture."""
        self._pool = pool or self._pool
        self._tracer.notes.add(GRAPHS)
        self._first = len(self._tracer.ledger.ops)
        Graph.num_capturing += 1

    def capture_end(self) -> None:
        """End a capture and keep its operations with their phases."""
        Graph.num_capturing -= 1
        ledger = self._tracer.ledger
        self._ops = [(ledger.segments[op.segment].phase, op) for op in ledger.ops[self._first :]]

    def replay(self) -> None:
        """Record the captured operations again; one that held an update is a step."""
        for phase, ops in itertools.groupby(self._ops, lambda one: one[0]):
            self._steps.replays(phase)
            live = self._tracer.live
            for _, op in ops:
                again = op._replace(
                    segment=live.segment, host=(0, 0, 0, 0), wrapped=(0, 0), in_mode=0, python=0
                )
                # The host launches a graph once.
                live.ledger.ops.append(again._replace(calls=int(op is self._ops[0][1])))

    def pool(self) -> tuple[int, int]:
        """Return the identifier of the graph's pool."""
        return self._pool

    reset = instantiate = enable_debug_mode = debug_dump = nothing


class Generator(torch.Generator):
    """A CPU generator for "cuda", from which no random number is drawn."""

    is_device: bool

    def __new__(cls, device: Any = CPU) -> Any:
        new: Any = super().__new__
        self = new(cls, CPU if names_cuda(device) else device)
        self.is_device = names_cuda(device)
        return self

    @property
    def device(self) -> torch.device:
        return CUDA if self.is_device else CPU
