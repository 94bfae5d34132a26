"""``torch.compile`` in a person's code: PyTorch's own compiler, for the virtual GPU (virtual/compiled).

Enters: a module, or a function that a module's forward or an optimizer calls. Leaves: what ``torch.compile`` returns, run
as the program that Inductor writes. What is compiled otherwise (another backend; a function outside forward and update;
before the trace) runs eagerly, and that is said.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from trainfit.spec.errors import InputError
from trainfit.virtual.compile import VirtualCompiler
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.scope import ScopeTracker
from trainfit.virtual.user.placement import CPU, CUDA, names_cuda
from trainfit.virtual.user.tracer import UserTracer

EAGER_BACKEND = "torch.compile with a backend other than inductor: traced as eager code"
EAGER_FUNCTION = "torch.compile of a function called outside a forward or an update: traced as eager code"
EAGER_EARLIER = "what torch.compile compiled before the trace began: traced as eager code"
OPTIONS = "torch.compile's mode and options: Inductor's defaults were taken (CUDA graphs' memory pools of their own are not modelled)"
PLAIN_MODES = (None, "default", "max-autotune-no-cudagraphs")


def learn_torch_cuda() -> None:
    """Let Dynamo look up PyTorch's functions while ``torch.cuda`` has its own; it does so once a process."""
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    get_torch_obj_rule_map()
    TorchInGraphFunctionVariable._get_handlers()


@contextmanager
def compiling(traits: GpuTraits, tracer: UserTracer, scopes: ScopeTracker) -> Iterator[None]:
    """``torch.compile(...)`` and ``module.compile()`` compile for the virtual GPU."""
    with UserCompiler(traits, tracer, scopes) as compiler, ExitStack() as stack:
        stack.enter_context(replaced(torch, "compile", compiler.compiled))
        stack.enter_context(
            replaced(nn.Module, "compile", lambda *args, **how: compiler.in_place(*args, **how))
        )
        stack.enter_context(compiler.alone())
        stack.enter_context(warnings.catch_warnings())
        # The virtual GPU's own hooks; they are taken out while compiled code runs.
        warnings.filterwarnings("ignore", message="Using `torch.compile")
        yield
        tracer.notes.update(compiler.assumptions())


class UserCompiler(VirtualCompiler):
    """Compiles what a person's code asks to have compiled."""

    def __init__(self, gpu: GpuTraits, tracer: UserTracer, scopes: ScopeTracker):
        super().__init__(gpu, tracer, scopes)
        self._user_tracer, self._notes = tracer, tracer.notes
        self._compile, self._compile_in_place = torch.compile, nn.Module.compile

    def compiled(self, model: Any = None, **how: Any) -> Any:
        """In place of ``torch.compile``."""
        if model is None:
            return functools.partial(self.compiled, **how)
        if how.get("backend") == self._backend:  # from ``in_place``, by way of PyTorch
            return self._compile(model, **how)
        settings = self._settings(how)
        if settings is None:
            return model
        optimized: Any = self._compile(model, backend=self._backend, **settings)
        if isinstance(model, nn.Module):
            optimized.forward = functools.partial(self._run, model, optimized.forward)
            return optimized
        return self._function(model, optimized)

    def in_place(self, module: nn.Module, *args: Any, **how: Any) -> None:
        """In place of ``nn.Module.compile``."""
        settings = self._settings(how)
        if settings is None:
            return
        self._compile_in_place(module, backend=self._backend, **settings)
        compiled: Any = module._compiled_call_impl
        module._compiled_call_impl = functools.partial(self._run, module, compiled)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Other compiled functions, such as those that a module's decorators compiled when it was imported, run eagerly."""
        from torch._dynamo import eval_frame

        original = eval_frame._callback_from_stance

        def callback(given: Any) -> Any:
            if given in (None, False) or self._is_ours(eval_frame.innermost_backend(given)):
                return original(given)
            self._notes.add(EAGER_EARLIER)
            return None

        with replaced(eval_frame, "_callback_from_stance", callback):
            yield

    def _is_ours(self, backend: Any) -> bool:
        return getattr(backend, "compiler_fn", backend) == self._backend

    def _settings(self, how: dict[str, Any]) -> dict[str, Any] | None:
        """What ``torch.compile`` is told; None: nothing is compiled."""
        if how.get("disable"):
            return None
        if how.get("backend", "inductor") != "inductor":
            self._notes.add(EAGER_BACKEND)
            return None
        if how.get("mode") not in PLAIN_MODES or how.get("options"):
            self._notes.add(OPTIONS)
        if not self._used:
            torch._dynamo.reset()
            self._used = True
        return {name: how[name] for name in ("fullgraph", "dynamic") if name in how}

    def _function(self, function: Callable[..., Any], optimized: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._scopes.phase in ("forward", "optimizer"):
                return self._run(None, optimized, *args, **kwargs)
            self._notes.add(EAGER_FUNCTION)
            return function(*args, **kwargs)

        return call

    def _run(self, module: nn.Module | None, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        try:
            with _as_dynamo_sees(self._user_tracer):
                return super()._run(module, compiled, *args, **kwargs)
        except TorchDynamoException as error:
            cause = str(error).strip().splitlines()
            raise InputError(
                f"torch.compile does not take this code on the virtual GPU: {cause[0] if cause else type(error).__name__}",
                "trace it without torch.compile: eager code mostly takes more memory",
                field="step",
            ) from error

    def _backend(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        for part in gm.modules():
            if isinstance(part, torch.fx.GraphModule):
                _put_on_cpu(part)
        return super()._backend(gm, example_inputs)


def _placed(value: Any) -> Any:
    return CPU if isinstance(value, torch.device | str) and names_cuda(value) else value


def _on_cpu(target: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A captured call that makes something on "cuda" or moves it there does so on the CPU, where all of it is."""
    if target == "cuda":
        return "to", (args[0], CPU), {}
    if target is torch.amp._enter_autocast:
        return target, args, kwargs
    return (target, *tree_map(_placed, (args, kwargs)))


def _put_on_cpu(gm: torch.fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if node.op in ("call_method", "call_function"):
            node.target, node.args, node.kwargs = _on_cpu(node.target, node.args, node.kwargs)
    gm.recompile()


@contextmanager
def _as_dynamo_sees(tracer: UserTracer) -> Iterator[None]:
    """While compiled code is called: whenever Dynamo captures a frame, it works on fake CPU tensors that say "cuda"."""
    from torch._dynamo import convert_frame, utils
    from torch._dynamo.variables.tensor import TensorVariable

    capture, specialize, run_node = convert_frame._compile, TensorVariable.specialize, utils.run_node

    def captured(*args: Any, **kwargs: Any) -> Any:
        outer, tracer.is_inside = tracer.is_inside, True
        try:
            return capture(*args, **kwargs)
        finally:
            tracer.is_inside = outer

    def told(value: torch.Tensor) -> dict[str, Any]:
        known = specialize(value)
        return {**known, "device": CUDA} if known["device"] == CPU else known

    def run(graph: Any, node: Any, args: Any, kwargs: Any, module: Any) -> Any:
        if node.op in ("call_method", "call_function"):
            target, args, kwargs = _on_cpu(node.target, args, kwargs)
            if target is not node.target:
                return getattr(args[0], target)(*args[1:], **kwargs)
        return run_node(graph, node, args, kwargs, module)

    with (
        replaced(convert_frame, "_compile", captured),
        replaced(TensorVariable, "specialize", staticmethod(told)),
        replaced(utils, "run_node", run),
    ):
        yield
