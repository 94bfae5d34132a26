"""``torch.compile`` in user code, compiled for the virtual GPU (virtual/compile).

Modules, and functions called in a forward or an optimizer, run as Inductor's programs. Other compiled code
runs eagerly, which is reported.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from trainfit.spec.errors import InputError
from trainfit.user.flex_attention import is_flex
from trainfit.user.placement import CPU, CUDA, names_cuda
from trainfit.user.tracer import UserTracer
from trainfit.virtual.compile import VirtualCompiler
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.scope import ScopeTracker

EAGER_BACKEND = "torch.compile with a backend other than inductor: traced as eager code"
EAGER_FUNCTION = "torch.compile of a function called outside a forward or an update: traced as eager code"
EAGER_EARLIER = "code that torch.compile compiled before the trace: traced as eager code"
OPTIONS = (
    "torch.compile's mode and options: Inductor's defaults were used "
    "(CUDA graphs' memory pools are not modelled)"
)
PLAIN_MODES = (None, "default", "max-autotune-no-cudagraphs")


def learn_torch_cuda() -> None:
    """Let Dynamo look up PyTorch's functions, once per process, while ``torch.cuda`` is unpatched."""
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    get_torch_obj_rule_map()
    TorchInGraphFunctionVariable._get_handlers()


@contextmanager
def compiling(traits: GpuTraits, tracer: UserTracer, scopes: ScopeTracker) -> Iterator[None]:
    """Compile ``torch.compile(...)`` and ``module.compile()`` for the virtual GPU."""
    with UserCompiler(traits, tracer, scopes) as compiler, ExitStack() as stack:
        stack.enter_context(replaced(torch, "compile", compiler.compiled))
        in_place = lambda *args, **options: compiler.in_place(*args, **options)  # noqa: E731
        stack.enter_context(replaced(nn.Module, "compile", in_place))
        stack.enter_context(compiler.only_own_code())
        stack.enter_context(warnings.catch_warnings())
        # A warning about module hooks: the virtual GPU removes its hooks while compiled code runs.
        warnings.filterwarnings("ignore", message="Using `torch.compile")
        yield
        tracer.notes.update(compiler.assumptions())


class UserCompiler(VirtualCompiler):
    """Compiles modules and functions for user code."""

    def __init__(self, gpu: GpuTraits, tracer: UserTracer, scopes: ScopeTracker):
        super().__init__(gpu, tracer, scopes)
        self._user_tracer, self._notes = tracer, tracer.notes
        # Lightning wraps torch.compile in a function that copies its arguments, which cannot be copied here.
        self._compile, self._compile_in_place = inspect.unwrap(torch.compile), nn.Module.compile

    def compiled(self, model: Any = None, **options: Any) -> Any:
        """Replace ``torch.compile``."""
        if model is None:
            return functools.partial(self.compiled, **options)
        if options.get("backend") == self._backend:  # Called through ``in_place``.
            return self._compile(model, **options)
        if is_flex(model):
            return model  # It runs as its own kernels.
        settings = self._settings(options)
        if settings is None:
            return model
        optimized: Any = self._compile(model, backend=self._backend, **settings)
        if isinstance(model, nn.Module):
            optimized.forward = functools.partial(self._run, model, optimized.forward)
            return optimized
        return self._function(model, optimized)

    def in_place(self, module: nn.Module, *args: Any, **options: Any) -> None:
        """Replace ``nn.Module.compile``."""
        settings = self._settings(options)
        if settings is None:
            return
        self._compile_in_place(module, backend=self._backend, **settings)
        compiled: Any = module._compiled_call_impl
        module._compiled_call_impl = functools.partial(self._run, module, compiled)

    @contextmanager
    def only_own_code(self) -> Iterator[None]:
        """Run other compiled functions eagerly, such as those compiled when a module was imported."""
        from torch._dynamo import eval_frame

        original = eval_frame._callback_from_stance

        def callback(current: Any) -> Any:
            if current in (None, False):
                return original(current)
            backend = eval_frame.innermost_backend(current)
            if getattr(backend, "compiler_fn", backend) == self._backend:
                return original(current)
            self._notes.add(EAGER_EARLIER)
            return None

        with replaced(eval_frame, "_callback_from_stance", callback):
            yield

    def _settings(self, options: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments for ``torch.compile``; None: run eagerly."""
        if options.get("disable"):
            return None
        if options.get("backend", "inductor") != "inductor":
            self._notes.add(EAGER_BACKEND)
            return None
        if options.get("mode") not in PLAIN_MODES or options.get("options"):
            self._notes.add(OPTIONS)
        self._begin()
        return {name: options[name] for name in ("fullgraph", "dynamic") if name in options}

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
            # The first line of a backend's failure names the backend alone.
            cause = [line for line in str(error).strip().splitlines() if not line.endswith("raised:")]
            raise InputError(
                "torch.compile does not support this code on the virtual GPU: "
                f"{cause[0] if cause else type(error).__name__}",
                "trace it without torch.compile: eager code mostly takes more memory",
                field="step",
            ) from error

    def _on_called(self, inputs: Any, output: Any) -> None:
        for observer in self._user_tracer.observers:
            observer.compiled_called(inputs, output)

    def _backend(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        for part in (each for each in gm.modules() if isinstance(each, torch.fx.GraphModule)):
            for node in part.graph.nodes:
                if node.op in ("call_method", "call_function"):
                    node.target, node.args, node.kwargs = _on_cpu(node.target, node.args, node.kwargs)
            part.recompile()
        return super()._backend(gm, example_inputs)


def _on_cpu(target: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Replace "cuda" by the CPU in a captured call that creates or moves a tensor."""

    def placed(value: Any) -> Any:
        return CPU if isinstance(value, torch.device | str) and names_cuda(value) else value

    if target == "cuda":
        return "to", (args[0], CPU), {}
    if target is torch.amp._enter_autocast:
        return target, args, kwargs
    return (target, *tree_map(placed, (args, kwargs)))


@contextmanager
def _as_dynamo_sees(tracer: UserTracer) -> Iterator[None]:
    """Let Dynamo capture frames with fake CPU tensors that report "cuda"."""
    from torch._dynamo import convert_frame, utils
    from torch._dynamo.variables.tensor import TensorVariable

    capture, specialize, run_node = convert_frame._compile, TensorVariable.specialize, utils.run_node

    def captured(*args: Any, **kwargs: Any) -> Any:
        with tracer.inside():
            return capture(*args, **kwargs)

    def specialized(value: torch.Tensor) -> dict[str, Any]:
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
        replaced(TensorVariable, "specialize", staticmethod(specialized)),
        replaced(utils, "run_node", run),
    ):
        yield
