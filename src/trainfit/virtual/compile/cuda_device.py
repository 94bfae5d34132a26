"""A CUDA device for Inductor's code generation, which reads its properties and nothing else.

``as_cuda`` patches ``torch.cuda`` and ``torch._dynamo.device_interface``, through which Inductor reads them.
"""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_map

from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.trace.exclusive import replaced

CUDA = torch.device("cuda", 0)
CUDA_TYPE, META_TYPE = 1, 14
"""``c10::DeviceType``, stable because part of PyTorch's file format."""
REGISTERS_PER_SM = 65536
"""From capability 7.0 on: CUDA C programming guide, technical specifications per compute capability."""


@contextmanager
def as_cuda(gpu: GpuTraits) -> Iterator[None]:
    """Make device 0 this GPU, with Triton available."""
    import torch._inductor.codecache as codecache
    import torch._inductor.scheduler as scheduler
    import torch._subclasses.fake_tensor as fake_tensor
    import torch.utils._triton as triton
    from torch._dynamo import device_interface
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.runtime.hints import DeviceProperties

    device_interface.get_interface_for_device("cuda")  # Fills the registry below.
    functions = device_functions(gpu, "virtual GPU") | {
        # Seed and offset of a recomputed random operation, on the host.
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "is_available": lambda: False,  # Avoids calls of the driver.
    }
    static = {name: staticmethod(function) for name, function in functions.items()}
    major, minor = gpu.compute_capability
    real = device_interface.CudaInterface
    interface = type("VirtualCudaInterface", (real,), {
        **static,
        "is_available": staticmethod(lambda: True),
        "get_compute_capability": staticmethod(lambda device=None: 10 * major + minor),
        "is_bf16_supported": staticmethod(lambda including_emulation=False: (major, minor) >= (8, 0)),
        "is_triton_capable": staticmethod(lambda device=None: True),
        "raise_if_triton_unavailable": staticmethod(lambda device=None: None),
        "Worker": type("Worker", (real.Worker,), static),
    })  # fmt: skip
    registry = device_interface.device_interfaces | {"cuda": interface, "cuda:0": interface}
    yes = lambda *args, **kwargs: True  # noqa: E731
    with ExitStack() as stack:
        stack.enter_context(_device_guard())
        for name, function in functions.items():
            stack.enter_context(replaced(torch.cuda, name, function))
        stack.enter_context(replaced(device_interface, "device_interfaces", registry))
        stack.enter_context(replaced(scheduler, "has_triton", yes))
        stack.enter_context(replaced(pad_mm, "has_triton", yes))
        stack.enter_context(replaced(triton, "triton_hash_with_backend", lambda *args, **kwargs: "virtual"))
        # Would hash Triton's files, and remember this GPU for later real compilations.
        stack.enter_context(replaced(codecache.CacheBase, "get_system", staticmethod(lambda: {"hash": ""})))
        # Without cuDNN, a fake convolution's gradients would have channels first, and the backward copies.
        stack.enter_context(replaced(torch._C, "_conv_determine_backend_memory_format", _cudnn_format))
        # Would create a CUDA context for a backward on tensors of this device.
        stack.enter_context(replaced(fake_tensor, "init_gpu_context", lambda device: None))
        DeviceProperties.create.cache_clear()  # pyright: ignore[reportFunctionMemberAccess]
        stack.callback(DeviceProperties.create.cache_clear)  # pyright: ignore[reportFunctionMemberAccess]
        yield


def _cudnn_format(x: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
    """Return cuDNN's choice (``cudnn_conv_suggest_memory_format``): channels last if either tensor has it."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    formats = [suggest_memory_format(each) for each in (x, weight)]
    if last is None or last not in formats or x.dtype == torch.float64:
        return torch.contiguous_format
    return last


@contextmanager
def _device_guard() -> Iterator[None]:
    """Register a device guard for CUDA in a CPU build: that of meta tensors, which does nothing.

    A CUDA build without a GPU registers such a guard itself (``c10::impl::ensureCUDADeviceGuardSet``).
    """
    if torch._C._has_cuda:  # ``torch.backends.cuda.is_built`` answers for the virtual GPU.
        yield
        return
    folder = Path(torch.__file__).parent / "lib"
    libraries = [path for name in ("libc10.so", "libc10.dylib") if (path := folder / name).exists()]
    if not libraries:
        raise RuntimeError(
            "a compiled step is predicted with PyTorch for CUDA (no GPU is needed), "
            "or for CPU on Linux or macOS"
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


def device_functions(gpu: GpuTraits, name: str, **more: Any) -> dict[str, Any]:
    """Return the functions of ``torch.cuda`` that describe a machine's only GPU, with ``more`` properties."""
    major, minor = gpu.compute_capability
    properties = SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=gpu.num_sms, warp_size=32,
        max_threads_per_multi_processor=gpu.threads_per_sm, max_threads_per_block=1024,
        regs_per_multiprocessor=REGISTERS_PER_SM, shared_memory_per_block_optin=gpu.shared_memory_bytes,
        gcnArchName="", **more,
    )  # fmt: skip
    return {
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: gpu.compute_capability,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
    }


def move_graph(graph: fx.Graph) -> None:
    """Replace CPU devices among the arguments of the graph's nodes by CUDA, in place."""

    def moved(value: Any) -> Any:
        return CUDA if isinstance(value, torch.device) and value.type == "cpu" else value

    for node in graph.nodes:
        node.args, node.kwargs = tree_map(moved, (node.args, node.kwargs))


def moved_tensor(value: Any) -> Any:
    """Return a fake CUDA tensor like a fake CPU tensor, other values unchanged; in a FakeTensorMode."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=CUDA)
