"""Small calls of private functions, on the host, whose results are those that trainfit relies on.

Each takes what a name refers to and returns plain values, which an entry compares with those of the checked
versions. They run on a thread of their own, where no mode is entered. No backward runs, and no fake mode but
ours is entered: both could change the process (``cpu_fakes.py``).
"""

import dataclasses
import io
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trainfit.virtual.trace.cpu_fakes import CpuFakeMode


def uses_of_storage(count: Any) -> int:
    """Return how many more users a storage has after a view of it is made."""
    x = torch.empty(2)
    address = x.untyped_storage()._cdata
    before = count(address)
    view = x.view(2)
    return count(address) - before if view is not None else -1


def uses_of_tensor(count: Any) -> int:
    """Return how many C++ owners a tensor has gained by being an input of a recorded operation."""
    x = torch.ones(2, requires_grad=True).clone()
    before = count(x)
    result = x.exp() * x
    return count(x) - before if result is not None else -1


def same_addresses(address: Any) -> list[bool]:
    """Return whether a view, and another tensor, have the address of a tensor's storage."""
    x, other = torch.empty(2), torch.empty(2)
    of = lambda t: address.__get__(t.untyped_storage())  # noqa: E731
    return [of(x) == of(x.view(1, 2)), of(x) == of(other)]


def resized(resize: Any) -> list[int]:
    """Return a storage's bytes after it is freed and taken back in place."""
    storage, sizes = torch.empty(4).untyped_storage(), list[int]()
    for size in (0, 16):
        resize(storage, size)
        sizes.append(storage.nbytes())
    return sizes


def dense(is_dense: Any) -> list[bool]:
    """Return whether a transposed, a sliced and an expanded tensor are dense."""
    x = torch.empty(4, 6)
    return [bool(is_dense(t)) for t in (x.t(), x[:, ::2], x[:1].expand(4, 6))]


def memory_formats(suggest: Any) -> list[str]:
    x = torch.empty(2, 3, 4, 5)
    return [str(suggest(x)), str(suggest(x.to(memory_format=torch.channels_last)))]


def autocast_kernels(has_kernel: Any) -> list[bool]:
    """Return whether a product, a view and a norm are cast on CUDA."""
    return [has_kernel(f"aten::{name}", "AutocastCUDA") for name in ("mm", "view", "layer_norm")]


def operators(names: Any) -> list[bool]:
    """Return whether operators are found by name and overload."""
    known = set(names())
    return [name in known for name in ("aten::layer_norm", "aten::softmax.int", "aten::none_such")]


def keys_below(after: Any) -> list[bool]:
    """Return which keys a call reaches below autograd of the CPU."""
    keys, key = after(torch._C.DispatchKey.AutogradCPU), torch._C.DispatchKey
    return [keys.has(one) for one in (key.AutogradCPU, key.CPU, key.AutocastCPU)]


def keys_of(keys: Any) -> list[bool]:
    of, key = keys(torch.ones(2, requires_grad=True)), torch._C.DispatchKey
    return [of.has(one) for one in (key.CPU, key.AutogradCPU, key.CUDA)]


def sequence(number: Any) -> int:
    """Return by how much a recorded operation raises autograd's sequence number."""
    before, x = number(), torch.ones(2, requires_grad=True).exp()
    return number() - before if x is not None else -1


def node_outside(current: Any) -> str:
    """Return the node that runs outside of a backward; one inside would start autograd's threads."""
    return type(current()).__name__


def precision(getter: Any) -> bool:
    return isinstance(getter("cuda", "matmul"), str)


def function_modes(length: Any) -> list[int]:
    """Return the number of function modes outside and inside one."""
    outside = length()
    with torch.device("cpu"):
        return [outside, length()]


def function_mode_stack(stack: Any) -> list[int]:
    return function_modes(lambda: len(stack()))


def dispatch_mode_stack(stack: Any) -> list[int]:
    outside = len(stack())
    with CpuFakeMode():
        return [outside, len(stack())]


def without_modes(disabled: Any) -> list[str]:
    """Return the class of a tensor that is made in a fake mode, with modes disabled and without."""
    with CpuFakeMode():
        with disabled():
            real = torch.empty(1)
        return [type(real).__name__, type(torch.empty(1)).__name__]


def fake_mode_of(active: Any) -> list[bool]:
    """Return whether there is a fake mode outside and inside one."""
    outside = active() is not None
    with CpuFakeMode() as mode:
        return [outside, active() is mode]


def meta_inside(manager: Any) -> list[str]:
    """Return the device of a fake tensor inside and outside of a kernel's invocation."""
    with CpuFakeMode() as mode:
        x = torch.empty(2)
        with manager(mode):
            inside = x.device.type
        return [inside, x.device.type]


def is_fake(asks: Any) -> list[bool]:
    with CpuFakeMode():
        fake = torch.empty(1)
    return [asks(torch.empty(1)), asks(fake)]


def made_subclass(make: Any) -> list[Any]:
    """Return what a fake tensor that is made of a meta tensor reports without its attributes."""
    from torch._subclasses.fake_tensor import FakeTensor

    meta, cpu = torch.empty(2, 3, device="meta"), torch.device("cpu")
    made = make(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=cpu)
    with torch._C.DisableTorchFunction():
        return [type(made).__name__, tuple(made.shape), made.requires_grad]


def increased_leaves(tree_map_only: Any) -> Any:
    return tree_map_only(int, lambda n: n + 1, [1, "a", {"b": (2, 3.0)}])


def increased(tree_map: Any) -> Any:
    return tree_map(lambda n: n + 1, [1, {"b": (2,)}])


def leaves(function: Any) -> list[Any]:
    return list(function([1, {"b": (2, "c")}]))


def wrapped(is_wrapper: Any) -> list[bool]:
    return [is_wrapper(torch.empty(1)), is_wrapper(torch.nn.Parameter(torch.empty(1)))]


def packed_sequences(find: Any) -> Any:
    """Return the sequences that positions without a gap belong to."""
    found = find(torch.arange(4)[None])
    return found if found is None else found.tolist()


def sdpa_flops(count: Any) -> int:
    shape = (1, 2, 4, 8)
    return count(shape, shape, shape)


def names(types: Any) -> list[str]:
    """Return the first class; importing torch.distributed adds others."""
    return [kind.__name__ for kind in types[:1]]


def functorch_settings(patch: Any) -> list[Any]:
    from torch._functorch import config

    with patch(
        enable_autograd_cache=False, force_non_lazy_backward_lowering=True, activation_memory_budget=0.5
    ):
        found: Any = config
        return [
            found.enable_autograd_cache,
            found.force_non_lazy_backward_lowering,
            found.activation_memory_budget,
        ]


def inductor_settings(patch: Any) -> list[Any]:
    from torch._inductor import config

    with patch(force_disable_caches=True, compile_threads=1, graph_partition=False):
        found: Any = config
        return [found.force_disable_caches, found.compile_threads, found.graph_partition]


def dynamo_settings(patch: Any) -> bool:
    from torch._dynamo import config

    with patch(optimize_ddp=False):
        found: Any = config
        return found.optimize_ddp


def decomposed(table: Any) -> list[bool]:
    """Return whether operators are decomposed."""
    aten, found = torch.ops.aten, table()
    return [op in found for op in (aten.native_layer_norm.default, aten.gelu.default, aten.mm.default)]


def peak(estimate: Any) -> list[Any]:
    """Return the peak, and the bytes after each of two kernels; the second reads the first's output."""
    highest, after = estimate(_two_kernels(), {}, set())
    return [highest, list(after)]


def neighbours(assign: Any) -> list[Any]:
    """Return, for each of two kernels, its bytes and the kernels and buffers before it."""
    kernels = _two_kernels()
    assign(kernels, {}, {}, {})
    return [
        (one.mpi_node.size, *([each.get_name() for each in before] for before in _before(one.mpi_node)))
        for one in kernels
    ]


def _before(planning: Any) -> tuple[Any, Any]:
    return planning.pred_nodes, planning.pred_buffers


def _two_kernels() -> "list[_Named]":
    from torch._inductor import memory

    kind: Any = memory.MemoryPlanningInfoForBuffer
    users = [field.name for field in dataclasses.fields(kind) if field.name.startswith("succ")]
    first, second = _Named("first"), _Named("second")
    first.give(kind(1024, 1024, **{name: {second} for name in users}))
    second.give(kind(512, 512))
    return [first, second]


class _Named:
    """Stand-in of a scheduled node, or of its output, which has the same name."""

    def __init__(self, name: str):
        self.get_name = lambda: name
        self.mpi_buffer: Any = None
        self.mpi_node: Any = None
        self._outputs: list[_Named] = []

    def give(self, planning: Any) -> None:
        output = _Named(self.get_name())
        output.mpi_buffer = planning
        self._outputs = [output]

    def get_outputs(self) -> "list[_Named]":
        return self._outputs


def unique(configs: Any) -> int:
    """Return how many configurations of a kernel are left of three, two of which are equal."""
    one = lambda size: SimpleNamespace(kwargs={"XBLOCK": size}, num_warps=4, num_stages=1)  # noqa: E731
    return len(configs([one(64), one(64), one(128)]))


def normalized(normalize: Any) -> list[Any]:
    """Return dtypes and shapes of a normalized bf16 tensor, its mean and its scale."""
    return [
        (str(t.dtype), tuple(t.shape)) for t in normalize(torch.ones(2, 4, dtype=torch.bfloat16), [1], 1e-5)
    ]


def chunks(cut: Any) -> list[int]:
    """Return the lengths of the chunks of five rows for four ranks."""
    return [len(one) for one in cut(torch.empty(5, 2), 4, 0)]


def flattened(flatten: Any) -> list[int]:
    return list(flatten([torch.empty(2, 3), torch.empty(4)]).shape)


def unflattened(unflatten: Any) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in unflatten(torch.empty(10), [torch.empty(2, 3), torch.empty(4)])]


def groups(group: Any) -> list[Any]:
    """Return the dtypes and numbers of tensors of the groups that foreach functions run over."""
    tensors: list[Tensor] = [torch.empty(1), torch.empty(1, dtype=torch.float16), torch.empty(2)]
    found = group([tensors], False)
    return sorted((str(key[1]), len(value[0][0])) for key, value in found.items())


def parsed(parse: Any) -> list[str]:
    return [str(each) for each in parse("cpu", torch.float16)[:2]]


def compatible(asks: Any) -> list[bool]:
    """Return whether a tensor's data can be set to one of another dtype, and of another device."""
    x = torch.empty(1)
    return [asks(x, x.half()), asks(x, torch.empty(1, device="meta"))]


def rebuilt(rebuild: Any) -> list[Any]:
    x = torch.arange(6.0)
    typed = SimpleNamespace(
        dtype=x.dtype, _untyped_storage=x.untyped_storage()
    )  # As TypedStorage, which warns
    return rebuild(typed, 2, (2,), (2,)).tolist()


def allowed(globals_of: Any) -> list[bool]:
    found = globals_of()
    return [f"torch._utils.{name}" in found for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3")]


def restored(location_of: Any) -> list[bool]:
    """Return whether a storage read for another device goes to the CPU."""
    storage = torch.empty(1).untyped_storage()
    return [location_of("cpu")(storage, "cuda:0").device.type == "cpu"]


def zip_files(is_zip: Any) -> list[bool]:
    return [is_zip(io.BytesIO(content)) for content in (b"PK\x03\x04....", b"\x80\x02....")]


def key_excluded(excluded: Any) -> bool:
    return excluded(torch._C.DispatchKey.AutogradFunctionality)


def innermost(backend_of: Any) -> bool:
    return backend_of(innermost) is innermost


def specialized(specialize: Any) -> list[str]:
    known = specialize(torch.empty(2, 3))
    return [str(known[name]) for name in ("device", "dtype", "ndim")]


def timeout_s(default: Any) -> float:
    return default("gloo").total_seconds()


def norms(foreach: Any) -> list[float]:
    return [float(t) for t in foreach([torch.tensor([3.0, 4.0]), torch.zeros(2)])]


def scaled(foreach: Any) -> list[list[float]]:
    tensors = [torch.tensor([3.0, 4.0])]
    foreach(tensors, 2.0)
    return [t.tolist() for t in tensors]


def mark(marks: Any) -> list[str]:
    """Return the attributes that a function has gained."""
    return sorted(vars(marks(lambda: None)).keys() - {"__wrapped__"})


def skips_initialised(initialize: Any) -> list[str]:
    """Return the attribute of a module that keeps it from being initialised, unlike another module."""
    marked, other, initialised = torch.nn.Identity(), torch.nn.Identity(), list[Any]()
    flag = "_is_hf_initialized"
    setattr(marked, flag, True)
    for module in (marked, other):
        initialize(SimpleNamespace(_init_weights=initialised.append), module)
    return [flag] if initialised == [other] else []


def _shapes(results: Any) -> list[Any]:
    return [tuple(t.shape) for t in results if isinstance(t, Tensor)]


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def flash(attend: Any) -> list[Any]:
    """Return the shapes of flash attention's results: the output, its log-sum-exp, what dropout needs."""
    q, k, v = (_meta(1, 2, 96, 64) for _ in range(3))
    return _shapes(attend(q, k, v, 0.0, True))


def biased(attend: Any) -> list[Any]:
    """Return the shapes of the results of the memory-efficient and of cuDNN's attention."""
    q, k, v = (_meta(1, 2, 96, 64) for _ in range(3))
    return _shapes(attend(q, k, v, None, True, 0.0, True))


def softmax(function: Any) -> list[str]:
    """Return the dtypes of fp16 and bf16 inputs' softmax, of the former with a result in fp32."""
    return [
        str(function(_meta(2, 3, dtype=torch.float16), -1, True).dtype),
        str(function(_meta(2, 3), -1, False).dtype),
    ]


def rms_norm(function: Any) -> list[Any]:
    """Return dtypes and shapes of RMSNorm's result and of the scale that it saves."""
    found = function(_meta(2, 4), [4], _meta(4), 1e-6)
    return [(str(t.dtype), tuple(t.shape)) for t in found]


def recurrent(function: Any) -> list[Any]:
    """Return the shapes of a plain tanh layer's output and states, [s, b, input 3] to 4."""
    f = torch.float32
    weights = [_meta(4, 3, dtype=f), _meta(4, 4, dtype=f)]
    options = (1, 4, 0, 1, False, 0.0, True, False, [], None)
    found = function(_meta(5, 2, 3, dtype=f), weights, 2, None, _meta(1, 2, 4, dtype=f), None, *options)
    return _shapes(found)
