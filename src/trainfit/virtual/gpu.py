"""The virtual GPU: enter it, build and run a step on ``torch.device("cpu")``, and read its ledger.

Inside, tensors are fake, composite operations decompose as on CUDA, and the tracer records every operation.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainfit.ledger.ledger import Ledger
from trainfit.virtual import torch_internals
from trainfit.virtual.bitsandbytes_library import NAME as BITSANDBYTES
from trainfit.virtual.bitsandbytes_library import RecipeOperators
from trainfit.virtual.compile import VirtualCompiler
from trainfit.virtual.cuda.fake_impls import report_fallbacks
from trainfit.virtual.cuda.ops import cuda_ops
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.trace.cpu_fakes import CpuFakeMode
from trainfit.virtual.trace.exclusive import exclusive, replaced
from trainfit.virtual.trace.host_random import own_generator
from trainfit.virtual.trace.host_tensors import HostTensorMode, PlacementState
from trainfit.virtual.trace.observer import Observer
from trainfit.virtual.trace.process_state import frozen_gc, restored_settings
from trainfit.virtual.trace.scope import LayerGroups, Scope, ScopeTracker
from trainfit.virtual.trace.tracer import Tracer


class VirtualGpu:
    """A running trace; the step reports the complete model and the beginning of each phase."""

    def __init__(self, tracer: Tracer, scopes: ScopeTracker, compiler: VirtualCompiler, notes: set[str]):
        self.tracer, self._scopes = tracer, scopes
        self.compiler = compiler
        self._notes = notes

    def assumptions(self) -> tuple[str, ...]:
        """Return the assumptions behind the ledger."""
        traits = self.tracer.gpu
        return (*(traits.assumptions if traits else ()), *self.compiler.assumptions(), *sorted(self._notes))

    def model_is_complete(
        self, model: nn.Module, groups: list[LayerGroups], copies: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Register the model's modules and parameters, which gives operations a scope.

        Args:
            copies: of parameters, by their names, which are weights too.
        """
        self._scopes.bind(model, groups)
        copied = (copies or {}).items()
        for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers(), *copied):
            self.tracer.live.own(tensor, "weights", self._scopes.locate(tensor_name, groups))
        for parameter in model.parameters():
            if parameter.requires_grad:
                self.tracer.live.watch_gradient(parameter, self.scope_of(parameter))
            if parameter.grad is not None:  # Kept from step to step.
                self.tracer.live.own(parameter.grad, "gradients", self.scope_of(parameter))
        self.tracer.live.built()

    @contextmanager
    def within(self, scope: Scope) -> Iterator[None]:
        """Give operations a scope while the model is built."""
        self._scopes.override = scope
        try:
            yield
        finally:
            self._scopes.override = None

    def running(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which parts of a module are called in place of its forward."""
        return self._scopes.running(module)

    def begin(self, step: str, phase: str) -> None:
        """Begin a phase (data, forward, backward, optimizer) of a step (first, steady)."""
        self.tracer.begin(step, phase)

    def scope_of(self, parameter: torch.Tensor) -> Scope:
        """Return the module and group of layers of a parameter of the complete model."""
        return self._scopes.of_parameter(parameter)

    def own_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Assign the optimizer's state tensors to the category optimizer."""
        for parameter, state in optimizer.state.items():
            scope = self._scopes.of_parameter(parameter)
            for value in state.values():
                for part in _parts(value) if isinstance(value, torch.Tensor) else ():
                    self.tracer.live.own(part, "optimizer", scope)

    def finish(self) -> Ledger:
        """Return the ledger."""
        return self.tracer.finish()


def _parts(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a wrapper subclass, such as torchao's, consists of; of others the tensor.

    A DTensor is itself: its owner and category are those of its local tensor.
    """
    if not is_traceable_wrapper_subclass(value) or hasattr(value, "_local_tensor"):
        return [value]
    return [getattr(value, name) for name in value.__tensor_flatten__()[0]]


@contextmanager
def virtual_gpu(
    traits: GpuTraits | None, *, prefers_cudnn: bool, observers: Sequence[Observer] = ()
) -> Iterator[VirtualGpu]:
    """Enter a virtual GPU; tensors made inside on the CPU are on it.

    Args:
        traits: None for a virtual CPU, whose operations are a real CPU's.
        prefers_cudnn: see ``attention_backend.choose_backend``.
        observers: follow the trace.
    """
    torch_internals.require("tracing", "operators")
    scopes = ScopeTracker(observers)
    notes: set[str] = set()
    with ExitStack() as stack:
        stack.enter_context(exclusive())
        stack.enter_context(restored_settings())
        stack.enter_context(own_generator())
        stack.enter_context(frozen_gc())
        stack.enter_context(report_fallbacks(notes))
        stack.enter_context(transformers_sees_real_tensors())
        if traits is not None:
            stack.enter_context(cuda_ops(traits.compute_capability, prefers_cudnn))
        stack.enter_context(CpuFakeMode(allow_non_fake_inputs=True))
        placement = PlacementState()
        tracer = Tracer(traits, scopes, placement, observers)
        if traits is not None:
            tracer.libraries[BITSANDBYTES] = RecipeOperators(tracer, stack).run
        stack.enter_context(HostTensorMode(placement))
        stack.enter_context(scopes)
        stack.enter_context(tracer)
        yield VirtualGpu(tracer, scopes, stack.enter_context(VirtualCompiler(traits, tracer, scopes)), notes)


@contextmanager
def transformers_sees_real_tensors() -> Iterator[None]:
    """Hide fake tensors from transformers, which would build masks and repeat keys as for an export."""
    import transformers.utils.import_utils as module

    with replaced(module, "is_fake_tensor", lambda tensor: False):
        yield
