"""Triton kernels that user code launches: recorded in the ledger, not launched.

``kernel[grid](...)`` ends in ``JITFunction.run``, or the interpreter's. The kernel's tensors are fake, so
nothing can run: a launch moves the bytes of its tensor arguments (``triton_accesses``) and its outputs stay
fake. An autotuner takes its first configuration, after one call that stands for its benchmark.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.custom_op import has_module
from trainfit.spec.errors import InputError
from trainfit.user.placement import CUDA, is_device, is_marked
from trainfit.user.tracer import UserTracer
from trainfit.user.triton_accesses import Access, accesses
from trainfit.virtual.compile.cuda_device import REGISTERS_PER_SM
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.host_tensors import forget_values, is_host

FLUSHED_BYTES = 256 << 20
"""Buffer that ``triton.testing.do_bench`` clears between two runs."""
BENCHMARK_MS = 1.0
"""Time of any benchmark on the virtual GPU, so that an autotuner's first configuration is the fastest."""
REGISTERS, SHARED_BYTES = 64, 16 << 10
"""Plausible registers and shared memory of a compiled kernel, which are unknown, for launchers that compute
their grid from them."""


@contextmanager
def triton_launches(gpu: GpuTraits, tracer: UserTracer) -> Iterator[None]:
    """Record the launches of Triton kernels on the virtual GPU; without effect where Triton is missing."""
    if not has_module("triton"):
        yield
        return
    import triton.testing
    from torch._library.triton import set_wrap_triton_enabled
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    launches = Launches(tracer, _options(is_hip=bool(gpu.gfx)))
    interpret = InterpretedFunction.run

    def interpreted(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if any(map(is_device, (*args, *kwargs.values()))):
            return launches.run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        return interpret(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launches.run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    def benchmark(call: Callable[[], Any], *_: Any, quantiles: Any = None, **__: Any) -> Any:
        return launches.benchmark(call, quantiles)

    tune, choices = Autotuner.run, dict[int, dict[Any, Any]]()

    def tuned(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        # A configuration chosen here must not be cached for a real GPU.
        own, kernel.cache = kernel.cache, choices.setdefault(id(kernel), {})
        try:
            return tune(kernel, *args, **kwargs)
        finally:
            kernel.cache = own

    def not_on_disk(kernel: Any, key: Any, configs: Any, bench: Callable[[], Any]) -> bool:
        bench()
        return False

    with ExitStack() as stack:
        enter = stack.enter_context
        enter(replaced(JITFunction, "run", run))
        enter(replaced(InterpretedFunction, "run", interpreted))
        enter(replaced(Autotuner, "run", tuned))
        enter(replaced(Autotuner, "check_disk_cache", not_on_disk))
        enter(replaced(Autotuner, "do_bench", property(lambda self: benchmark)))
        enter(replaced(triton.testing, "do_bench", benchmark))
        enter(replaced(driver, "_active", Driver(gpu, benchmark)))
        enter(set_wrap_triton_enabled(False))  # A wrapped kernel is launched as if it were not wrapped.
        yield
        tracer.notes.update(launches.notes())


class Launches:
    """Records launches, and remembers the names of the kernels.

    Args:
        options: names of a launch's options, which are no arguments of the kernel.
    """

    def __init__(self, tracer: UserTracer, options: frozenset[str]):
        self._tracer, self._options = tracer, options
        self._names: set[str] = set()
        self._is_muted = False

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> "CompiledKernel":
        """Act as ``JITFunction.run`` up to the launch: bind the arguments and compute the grid."""
        signature = inspect.signature(kernel.fn)
        names = signature.parameters
        own = {name: value for name, value in kwargs.items() if name in names}
        unknown = kwargs.keys() - own.keys() - self._options
        if unknown:
            raise KeyError(f"Keyword argument {min(unknown)} was specified but unrecognised")
        bound = signature.bind(*args, **own)
        bound.apply_defaults()
        compiled = CompiledKernel(self, kernel, kwargs)
        if not warmup:
            self.launch(kernel, bound.arguments, grid(bound.arguments) if callable(grid) else grid)
        return compiled

    def launch(self, kernel: Any, arguments: dict[str, Any], grid: Any) -> None:
        """Record a launch.

        Args:
            arguments: by name of the kernel's parameter.
            grid: one to three numbers of programs.

        Raises:
            ValueError: a tensor is on the host, as Triton's launcher raises.
        """
        for number, value in enumerate(arguments.values()):
            if is_host(value) or is_marked(value):
                raise ValueError(
                    f"Pointer argument (at {number}) cannot be accessed from Triton (cpu tensor?)"
                )
        if self._is_muted or any(int(number) == 0 for number in grid):
            return
        name = kernel.fn.__name__
        known = accesses(kernel.fn)
        moved: dict[tuple[int, int], tuple[int, Access]] = {}
        dtype = "int64"
        with torch.no_grad(), torch._C.DisableTorchFunction(), self._tracer.inside():
            for parameter, value in arguments.items():
                for t in _tensors(value):
                    access = known.get(parameter, Access(reads=True, writes=False))
                    key = t.untyped_storage()._cdata, int(t.storage_offset())
                    size, before = moved.get(key, (0, Access()))
                    moved[key] = max(size, _stored_bytes(t)), before | access
                    if access.writes:
                        forget_values(t)
                    if dtype == "int64" and t.is_floating_point():
                        dtype = str(t.dtype).removeprefix("torch.")
        num_bytes = sum(size * (access.reads + access.writes) for size, access in moved.values())
        self._tracer.launched(f"triton.{name}", num_bytes, dtype)
        self._names.add(name)

    def benchmark(self, call: Callable[[], Any], quantiles: Any) -> Any:
        """Call once without a record of launches, with the buffer that a benchmark clears."""
        cache = torch.empty(FLUSHED_BYTES // 4, dtype=torch.int, device=CUDA)
        before, self._is_muted = self._is_muted, True
        try:
            call()
        finally:
            self._is_muted = before
        del cache
        return BENCHMARK_MS if quantiles is None else [BENCHMARK_MS] * len(quantiles)

    def notes(self) -> list[str]:
        """Return the estimate's notes about the kernels."""
        if not self._names:
            return []
        return [
            f"Triton kernels of the script ({', '.join(sorted(self._names))}): not launched; their time is "
            "that of their arguments' bytes, and their FLOPs are not counted"
        ]


class CompiledKernel:
    """Result of a launch, with plausible figures for launchers that read them."""

    def __init__(self, launches: Launches, kernel: Any, options: dict[str, Any]):
        self._launches, self._kernel = launches, kernel
        self.name = kernel.fn.__name__
        self.n_regs, self.n_spills, self.n_max_threads = REGISTERS, 0, 1024
        self.metadata = SimpleNamespace(
            name=self.name, shared=SHARED_BYTES, num_warps=options.get("num_warps", 4),
            num_stages=options.get("num_stages", 3), num_ctas=options.get("num_ctas", 1),
        )  # fmt: skip

    def _init_handles(self) -> None:
        """Do nothing: the kernel is not loaded."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **_: Any) -> None:
            names = list(inspect.signature(self._kernel.fn).parameters)
            if len(args) < len(names):
                constants = {p.name for p in self._kernel.params if p.is_constexpr}
                names = [name for name in names if name not in constants]
            self._launches.launch(self._kernel, dict(zip(names, args, strict=False)), grid)

        return launch

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"Triton kernel {self.name} is not compiled on the virtual GPU, which does not know its {name!r}"
        )


class Driver:
    """Triton's driver of the virtual GPU."""

    def __init__(self, gpu: GpuTraits, benchmark: Callable[..., Any]):
        self._gpu, self._benchmark = gpu, benchmark
        self.utils = SimpleNamespace(get_device_properties=self._properties)

    def _properties(self, device: int = 0) -> dict[str, int]:
        return {
            "max_shared_mem": self._gpu.shared_memory_bytes,
            "max_num_regs": REGISTERS_PER_SM,
            "multiprocessor_count": self._gpu.num_sms,
            "warpSize": 32,
        }

    def get_current_target(self) -> Any:
        """Return the target that Triton compiles for."""
        from triton.backends.compiler import GPUTarget

        if self._gpu.gfx:
            return GPUTarget("hip", self._gpu.gfx, 64)
        major, minor = self._gpu.compute_capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        """Return the GPU's number."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """Return the handle of the default stream."""
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        """Return the compute capability."""
        return self._gpu.compute_capability

    def get_active_torch_device(self) -> torch.device:
        """Return PyTorch's name of the GPU."""
        return CUDA

    def get_device_interface(self) -> Any:
        """Return the module whose events and streams a benchmark uses."""
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return a function like ``triton.testing.do_bench``."""
        return self._benchmark

    def get_empty_cache_for_benchmark(self) -> Tensor:
        """Return the buffer that a benchmark clears."""
        return torch.empty(FLUSHED_BYTES // 4, dtype=torch.int, device=CUDA)

    def clear_cache(self, cache: Tensor) -> None:
        """Clear the buffer."""
        cache.zero_()

    def __getattr__(self, name: str) -> Any:
        raise InputError(
            f"Triton's driver of the virtual GPU has no {name!r}: kernels are recorded, not compiled",
            "launch them as kernel[grid](...)",
            field="step",
            value=f"triton.runtime.driver.active.{name}",
        )


@cache
def _options(is_hip: bool) -> frozenset[str]:
    """Return the names of a launch's options on a GPU of either vendor."""
    if is_hip:
        from triton.backends.amd.compiler import HIPOptions as Options
    else:
        from triton.backends.nvidia.compiler import CUDAOptions as Options

    names = {field.name for field in fields(Options)}
    return frozenset(names | {"num_buffers_warp_spec", "num_consumer_groups"})


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of an argument: a tensor, a tuple, a descriptor or a reinterpreted tensor."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [t for item in value for t in _tensors(item)]
    base = getattr(value, "base", None)
    return [base] if isinstance(base, Tensor) else []


def _stored_bytes(t: Tensor) -> int:
    """Return the bytes of a tensor's elements in memory: those of a broadcast dimension count once."""
    numel = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        numel *= 1 if stride == 0 and size else size
    return numel * t.element_size()
