"""``user_gpu``: a virtual GPU for unchanged user code."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import _foreach_supported_types as optimizer_types
from torch.utils import _foreach_utils, swap_tensors
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainfit.spec.hardware import Gpu
from trainfit.user.autocast import cuda_autocast
from trainfit.user.bitsandbytes_library import bitsandbytes_library
from trainfit.user.compile import compiling, learn_torch_cuda
from trainfit.user.files import files
from trainfit.user.flex_attention import flex_attention
from trainfit.user.libraries import libraries
from trainfit.user.placement import CUDA, is_device, is_marked
from trainfit.user.process_groups import single_rank
from trainfit.user.steps import StepFollower
from trainfit.user.tensors import UserTensorMode, real_of
from trainfit.user.torch_cuda import MemoryStats, Streams, cuda_module
from trainfit.user.tracer import UserTracer
from trainfit.user.triton_launches import triton_launches
from trainfit.virtual import torch_internals
from trainfit.virtual.cuda.fake_impls import report_fallbacks
from trainfit.virtual.cuda.ops import cuda_ops
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.gpu import transformers_sees_real_tensors
from trainfit.virtual.trace.cpu_fakes import CpuFakeMode
from trainfit.virtual.trace.exclusive import exclusive, replaced
from trainfit.virtual.trace.host_random import own_generator
from trainfit.virtual.trace.host_tensors import PlacementState, is_host
from trainfit.virtual.trace.observer import StreamPools
from trainfit.virtual.trace.process_state import (
    restored_environment,
    restored_random,
    restored_settings,
    restored_switches,
)
from trainfit.virtual.trace.scope import ScopeTracker

if TYPE_CHECKING:
    from trainfit.virtual.cluster.ddp import FirstBuckets


class UserGpu:
    """A trace of user code."""

    def __init__(
        self,
        tracer: UserTracer,
        steps: StepFollower,
        memory_stats: MemoryStats,
        num_ranks: int = 1,
        buckets: "FirstBuckets | None" = None,
    ):
        self.tracer, self.steps, self.memory_stats = tracer, steps, memory_stats
        self.num_ranks = num_ranks
        self.buckets = buckets  # DDP's, on several ranks


@contextmanager
def user_gpu(
    gpu: Gpu,
    *,
    prefers_cudnn: bool,
    max_steps: int,
    num_ranks: int | None = None,
    evaluates_at: str = "",
) -> Iterator[UserGpu]:
    """Enter a virtual GPU named "cuda"; after ``max_steps`` optimizer steps ``TraceComplete`` is raised.

    Args:
        num_ranks: run as rank 0 of this many ranks; None: as the only process.
        evaluates_at: file and line of code that evaluates; the trace may go beyond ``max_steps`` to reach it.
            Empty: no such code.
    """
    with exclusive(), _user_gpu(gpu, prefers_cudnn, max_steps, num_ranks, evaluates_at) as virtual:
        yield virtual


@contextmanager
def _user_gpu(
    gpu: Gpu, prefers_cudnn: bool, max_steps: int, num_ranks: int | None, evaluates_at: str
) -> Iterator[UserGpu]:
    torch_internals.require("tracing", "operators", "scripts")
    streams = Streams()
    if num_ranks is None:
        steps, of_rank = StepFollower(max_steps, evaluates_at), (StreamPools(streams.current),)
    else:
        torch_internals.require("ranks")
        from trainfit.user import ranks  # Imports torch.distributed.

        steps = StepFollower(max_steps, evaluates_at, ranks.data_ranks_of(num_ranks))
        of_rank = ranks.observers(streams.current)
    observers = (steps, *of_rank)
    traits = GpuTraits.of(gpu)
    local_ranks = min(num_ranks or 1, gpu.gpus_per_host)
    scopes, placement = ScopeTracker(observers), PlacementState()
    # Imports PyTorch's compiler, which must see the real torch.cuda.
    fake = CpuFakeMode(allow_non_fake_inputs=True)
    learn_torch_cuda()
    tracer = UserTracer(traits, scopes, placement, fake, observers)
    memory_stats = MemoryStats(tracer, gpu.usable_bytes)
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(restored_settings())
        enter(restored_switches())
        enter(restored_environment())
        enter(restored_random())
        enter(own_generator())
        enter(transformers_sees_real_tensors())
        enter(libraries())
        enter(files(tracer.notes, steps.saves))
        if num_ranks is None:
            enter(single_rank())
        enter(report_fallbacks(tracer.notes))
        enter(cuda_module(gpu, traits, memory_stats, steps, streams, local_ranks))
        enter(triton_launches(traits, tracer))
        quantized = enter(bitsandbytes_library(tracer))
        enter(cuda_autocast())
        enter(cuda_ops(traits.compute_capability, prefers_cudnn))
        enter(fake)
        enter(_fake_parameters(tracer, steps, quantized.before_optimizer))
        enter(_reports_cuda(tracer))
        tracer.functions = UserTensorMode(
            placement, steps.engine_runs, tracer.twin_on_host, tracer.count_read
        )
        enter(tracer.functions)
        enter(scopes)
        enter(steps)
        enter(tracer)
        enter(compiling(traits, tracer, scopes))
        enter(flex_attention(tracer))
        if num_ranks is None:
            yield UserGpu(tracer, steps, memory_stats)
            return
        buckets = enter(ranks.virtual_rank(num_ranks, local_ranks, tracer, steps))
        yield UserGpu(tracer, steps, memory_stats, num_ranks, buckets)


@contextmanager
def _fake_parameters(
    tracer: UserTracer, steps: StepFollower, before_optimizer: Callable[[Any], None]
) -> Iterator[None]:
    """Make parameters on the host fake, and keep Parameter objects when a module moves, as with CUDA."""
    original: Callable[..., Any] = nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) in (Tensor, nn.Parameter) and is_host(data) and data.device.type == "cpu":
            data = tracer.twin_on_host(data)
        parameter = original(cls, data, requires_grad)
        steps.parameter_made(parameter)
        return parameter

    make_subclass = torch.Tensor._make_subclass

    def make(cls: Any, data: Any, require_grad: bool = False, **kwargs: Any) -> Any:
        # How libraries make parameters of classes of their own (bitsandbytes' Params4bit).
        if is_host(data) and issubclass(cls, nn.Parameter) and data.device.type == "cpu":
            data = tracer.twin_on_host(data)
        if not isinstance(data, FakeTensor):
            return make_subclass(cls, data, require_grad, **kwargs)
        with torch.no_grad():
            made = data.detach()
        made.__class__ = _fake_class(cls)
        made.requires_grad_(require_grad)
        if issubclass(cls, nn.Parameter):
            steps.parameter_made(made)
        return made

    init_optimizer: Callable[..., None] = torch.optim.Optimizer.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        steps.has_optimizer = True
        before_optimizer(self)
        init_optimizer(self, *args, **kwargs)

    with (
        replaced(nn.Parameter, "__new__", staticmethod(new)),
        replaced(torch.Tensor, "_make_subclass", staticmethod(make)),
        replaced(nn.Module, "_apply", _applied(steps)),
        replaced(nn.Module, "state_dict", steps.reading_state(nn.Module.state_dict)),
        replaced(torch.optim.Optimizer, "__init__", init),
        replaced(torch.inference_mode, "__enter__", _without_grad),
        replaced(torch.inference_mode, "__exit__", _with_grad_again),
    ):
        yield


def _without_grad(mode: Any) -> None:
    """Switch gradients off in place of inference mode, in which operations do not decompose as on CUDA."""
    mode._inference_mode_context = torch.autograd.set_grad_enabled(not mode.mode)


def _with_grad_again(mode: Any, *raised: Any) -> None:
    mode._inference_mode_context.__exit__(*raised)


def _applied(steps: StepFollower) -> Callable[..., Any]:
    """Return ``nn.Module._apply`` as it acts on real tensors.

    PyTorch swaps the contents of every fake parameter, but of real parameters only those that wrap other
    tensors (DTensor). Tied parameters that are swapped stay tied when they leave the meta device, others do
    not.
    """

    def apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for module in self.children() if recurse else ():
            module._apply(fn)
        for key, parameter in self._parameters.items():
            if parameter is None:
                continue
            grad, parameter.grad = parameter.grad, None  # A gradient's owner cannot be swapped.
            with torch.no_grad():
                applied = fn(parameter)
                grad = None if grad is None else fn(grad)
            if is_traceable_wrapper_subclass(applied):
                with steps.swapped(parameter):
                    applied = nn.Parameter(applied, parameter.requires_grad)
                    swap_tensors(parameter, applied)
            elif torch._has_compatible_shallow_copy_type(parameter, applied):
                parameter.data = applied
            else:
                parameter = self._parameters[key] = nn.Parameter(applied, parameter.requires_grad)
            if grad is not None:
                parameter.grad = grad
        for key, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[key] = fn(buffer)
        return self

    return apply


@cache
def _fake_class(cls: type) -> Any:
    """Return a class of fake tensors with the methods of another subclass of ``torch.Tensor``."""
    return cls if issubclass(cls, FakeTensor) else type(cls.__name__, (cls, FakeTensor), {})


@contextmanager
def _reports_cuda(tracer: UserTracer) -> Iterator[None]:
    """Let fake tensors report CUDA to user code and PyTorch's Python code, not to FakeTensor's own."""
    original = vars(FakeTensor)["device"]

    def device(self: Any) -> torch.device:
        known = original.fget(self)
        if tracer.is_inside or known.type != "cpu" or is_marked(self):
            return known
        return CUDA

    grouped = torch._C._group_tensors_by_device_and_dtype  # pyright: ignore[reportAttributeAccessIssue]

    def group(lists: Any, with_indices: bool = False) -> Any:
        groups = grouped(lists, with_indices)
        return {
            (CUDA if value[0][0] and is_device(value[0][0][0]) else key[0], key[1]): value
            for key, value in groups.items()
        }

    types = (optimizer_types, _foreach_utils._foreach_supported_types)
    with (
        replaced(FakeTensor, "device", property(device, original.fset)),
        replaced(FakeTensor, "is_cuda", property(lambda self: self.device.type == "cuda")),
        replaced(FakeTensor, "tolist", lambda self: real_of(self).tolist()),
        replaced(FakeTensor, "record_stream", lambda self, stream: None),
        replaced(torch._C, "_group_tensors_by_device_and_dtype", group),
    ):
        for known in types:
            known.append(FakeTensor)
        try:
            yield
        finally:
            for known in types:
                known.remove(FakeTensor)
