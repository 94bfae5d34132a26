"""A CUDA device that Inductor believes in: it asks for its properties, and never for more while it only writes code.

Inductor reads them through ``torch.cuda`` and ``torch._dynamo.device_interface``; both answer for the virtual GPU
inside ``as_cuda`` and for the real machine again afterwards.
"""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.trace.exclusive import replaced

CUDA = torch.device("cuda", 0)
CUDA_TYPE, META_TYPE = 1, 14
"""``c10::DeviceType``; the numbers are part of PyTorch's file format and stay."""
REGISTERS_PER_SM = 65536
"""Of every capability from 7.0 on: CUDA C programming guide, technical specifications per compute capability."""


@contextmanager
def as_cuda(gpu: GpuTraits) -> Iterator[None]:
    """Device 0 is this GPU, Triton is there, and nothing asks the real machine."""
    import torch._inductor.scheduler as scheduler
    import torch._subclasses.fake_tensor as fake_tensor
    import torch.utils._triton as triton
    from torch._dynamo import device_interface
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.runtime.hints import DeviceProperties

    device_interface.get_interface_for_device("cuda")  # fills the registry below
    answers = _answers(gpu)
    interface = type("VirtualCudaInterface", (device_interface.CudaInterface,), {
        **{name: staticmethod(answer) for name, answer in answers.items()},
        "is_available": staticmethod(lambda: True),
        "get_compute_capability": staticmethod(lambda device=None: 10 * gpu.compute_capability[0] + gpu.compute_capability[1]),
        "is_bf16_supported": staticmethod(lambda including_emulation=False: gpu.compute_capability >= (8, 0)),
        "is_triton_capable": staticmethod(lambda device=None: True),
        "raise_if_triton_unavailable": staticmethod(lambda device=None: None),
        "Worker": type("Worker", (device_interface.CudaInterface.Worker,), {name: staticmethod(answer) for name, answer in answers.items()}),
    })  # fmt: skip
    yes = lambda *args, **kwargs: True  # noqa: E731
    with ExitStack() as stack:
        stack.enter_context(_device_guard())
        for name, answer in answers.items():
            stack.enter_context(replaced(torch.cuda, name, answer))
        registry = device_interface.device_interfaces
        stack.enter_context(
            replaced(
                device_interface, "device_interfaces", registry | {"cuda": interface, "cuda:0": interface}
            )
        )
        stack.enter_context(replaced(scheduler, "has_triton", yes))
        stack.enter_context(replaced(pad_mm, "has_triton", yes))
        stack.enter_context(replaced(triton, "triton_hash_with_backend", lambda *args, **kwargs: "virtual"))
        # It would make a CUDA context, for a backward that is not run on tensors of this device.
        stack.enter_context(replaced(fake_tensor, "init_gpu_context", lambda device: None))
        DeviceProperties.create.cache_clear()  # pyright: ignore[reportFunctionMemberAccess]
        stack.callback(DeviceProperties.create.cache_clear)  # pyright: ignore[reportFunctionMemberAccess]
        yield


@contextmanager
def _device_guard() -> Iterator[None]:
    """Let PyTorch's C++ switch to a CUDA device that is not there, in a build for the CPU.

    PyTorch gives CUDA a guard that does nothing where a CUDA build finds no GPU (``c10::impl::ensureCUDADeviceGuardSet``,
    for fake tensors). A CPU build has none at all: for a while it gets that of meta tensors, which does nothing either.

    Raises:
        RuntimeError: this build's library does not say where guards are registered (Windows).
    """
    if torch.backends.cuda.is_built():
        yield
        return
    folder = Path(torch.__file__).parent / "lib"
    libraries = [path for name in ("libc10.so", "libc10.dylib") if (path := folder / name).exists()]
    if not libraries:
        raise RuntimeError(
            "a compiled step is predicted with PyTorch for CUDA (no GPU is needed), or for CPU on Linux or macOS"
        )
    # std::array<std::atomic<const DeviceGuardImplInterface*>, COMPILE_TIME_MAX_DEVICE_TYPES>
    guards = (ctypes.c_void_p * (META_TYPE + 1)).in_dll(
        ctypes.CDLL(str(libraries[0])), "_ZN3c104impl26device_guard_impl_registryE"
    )
    guards[CUDA_TYPE] = guards[META_TYPE]
    try:
        yield
    finally:
        guards[CUDA_TYPE] = None


def _answers(gpu: GpuTraits) -> dict[str, Any]:
    major, minor = gpu.compute_capability
    properties = SimpleNamespace(
        name="virtual GPU", major=major, minor=minor, multi_processor_count=gpu.num_sms, warp_size=32,
        max_threads_per_multi_processor=gpu.threads_per_sm, max_threads_per_block=1024,
        regs_per_multiprocessor=REGISTERS_PER_SM, shared_memory_per_block_optin=gpu.shared_memory_bytes,
        gcnArchName="",
    )  # fmt: skip
    return {
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: gpu.compute_capability,
        # The state a recomputed random operation starts from: seed and offset, on the host.
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: False,  # nothing is to be asked of a driver
    }


def move_graph(graph: fx.Graph) -> None:
    """Make the graph's CPU devices CUDA's, in place: the arguments that say where a tensor is made."""

    def moved(value: Any) -> Any:
        return CUDA if isinstance(value, torch.device) and value.type == "cpu" else value

    for node in graph.nodes:
        node.args, node.kwargs = tree_map(moved, (node.args, node.kwargs))


def moved_tensor(value: Any) -> Any:
    """A fake CUDA tensor like this fake CPU tensor; what is no tensor as it is. Call it inside a FakeTensorMode."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=CUDA)
