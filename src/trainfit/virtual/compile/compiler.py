"""``VirtualCompiler``: compiles modules on the virtual GPU, for ``assemble``."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from trainfit.ledger.ledger import MIDDLE, RepeatError
from trainfit.spec.errors import InputError
from trainfit.virtual import torch_internals
from trainfit.virtual.compile.generate import Source, generate
from trainfit.virtual.compile.joint_graph import cuda_choices, decompositions
from trainfit.virtual.compile.program import Program
from trainfit.virtual.compile.tuning import Tuning
from trainfit.virtual.compile.unrolled import Layers
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.process_state import freeze_more, no_function_modes, paused_gc
from trainfit.virtual.trace.repeated_layers import signature
from trainfit.virtual.trace.scope import ScopeTracker
from trainfit.virtual.trace.tracer import Tracer


def has_pre_hooks(module: nn.Module) -> bool:
    """Return whether hooks run before the module's forward; the handle of one more has all of them."""
    handle = module.register_forward_pre_hook(lambda *_: None)
    try:
        return len(handle.hooks_dict_ref() or ()) > 1
    finally:
        handle.remove()


class VirtualCompiler:
    """``compiler(module)`` compiles a module in place, as ``module.compile()`` does on a GPU.

    A context manager that resets Dynamo at the end.
    """

    def __init__(self, gpu: GpuTraits | None, tracer: Tracer, scopes: ScopeTracker):
        self._gpu, self._tracer, self._scopes = gpu, tracer, scopes
        self._tuning = Tuning(gpu.l2_cache_bytes) if gpu else None
        self._used = False
        self._copies: set[tuple[int, ...]] = set()
        """Padded sizes of operands whose padding is a close decision: another run may not pad them."""
        self.num_graphs = 0
        """Captured graphs."""
        self.layers: Layers | None = None
        """Repeated layers of a model that is compiled whole, by module names of the complete model."""
        self.lowers_ahead = False
        """Lower a forward in a fork; running it may raise OtherStridesError."""
        self._programs: list[Program] = []
        self._signatures: set[Any] = set()
        self._num_hooked = 0
        """Compiled modules with hooks, which Dynamo captures apart from their forward."""

    def __call__(self, module: nn.Module, **settings: Any) -> None:
        self._begin()
        self._signatures.add(signature(module))
        self._num_hooked += has_pre_hooks(module)
        module.compile(backend=self._backend, **settings)
        compiled: Any = module._compiled_call_impl
        module._compiled_call_impl = partial(self._run, module, compiled)

    def _begin(self) -> None:
        """Reset Dynamo before the first module is compiled."""
        if not self._used:
            torch_internals.require("compiler")
            torch._dynamo.reset()
            self._used = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._used:
            torch._dynamo.reset()

    def check_layers(self) -> None:
        """Check that the programs of a shortened model are those of its layers.

        Raises:
            RepeatError: Dynamo captured each layer separately, so that its limit of graphs applies, or the
                model was compiled whole and its graph does not hold all layers.
        """
        repeating = sum(any(kernel.position for kernel in program.kernels) for program in self._programs)
        if self.layers is not None and (self.num_graphs, repeating) != (1, 2):
            raise RepeatError("the layers are not in one graph")
        if self.num_graphs > 2 * len(self._signatures) + self._num_hooked:
            raise RepeatError("equal layers are compiled into graphs of their own")

    def work(self) -> tuple[int, int]:
        """Return what is compiled: graphs, and kernels and library calls of their programs.

        A middle layer of a model that was compiled whole counts for all that it stands for. Code that is
        compiled once and runs in several blocks counts once.
        """
        times = self.layers.times if self.layers is not None else 1
        kernels = (kernel for program in self._programs for kernel in program.kernels)
        middle = [kernel.position is not None and kernel.position.part == MIDDLE for kernel in kernels]
        return self.num_graphs, len(middle) + (times - 1) * sum(middle)

    def assumptions(self) -> tuple[str, ...]:
        """Return the assumptions behind a prediction of compiled code."""
        if not self.num_graphs:
            return ()
        return (
            f"compiled code: the programs that torch {torch.__version__}'s Inductor writes for this GPU; "
            "matrix products and attention by the same libraries as without compiling; "
            "in the first step kernels are tuned, as nothing was compiled on the machine before",
        )

    def _run(self, module: nn.Module | None, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        num_graphs = self.num_graphs
        try:
            with self._scopes.within_compiled(module), no_function_modes(), paused_gc(), _no_logs():
                output = _with_room(compiled, *args, **kwargs)
                self._on_called((args, kwargs), output)
                return output
        except TorchDynamoException as error:
            refused = _refusal(error)
            if refused is None:
                raise
            raise refused from None
        finally:
            if self.num_graphs != num_graphs:
                # Capturing leaves reference cycles that hold traced tensors.
                gc.collect()
                freeze_more()

    def _on_called(self, inputs: Any, output: Any) -> None:
        """Note the inputs and the output of a call of compiled code."""

    def _backend(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        from torch._functorch import config as functorch_config
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        self.num_graphs += 1
        # Cached programs are for real devices.
        settings = functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True)
        choices = cuda_choices(self._copies) if self._gpu else nullcontext()
        table = decompositions() if self._gpu else None
        # Warm worker processes would compile the kernels. Partitions serve CUDA graphs alone.
        inductor_settings = config.patch(force_disable_caches=True, compile_threads=1, graph_partition=False)
        with settings, inductor_settings, choices:
            return compile_fx(gm, list(example_inputs), inner_compile=self._inner, decompositions=table)

    def _inner(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **graph_kwargs: Any) -> Any:
        graph_kwargs.pop("compile_region_name", None)  # Since torch 2.13, a name for profiles.
        compiled = generate(
            gm, example_inputs, self._gpu, graph_kwargs, self._program, self._layers(),
            ahead=self.lowers_ahead,
        )  # fmt: skip
        return _runnable(compiled.current_callable)

    def _layers(self) -> Layers | None:
        """Return the repeated layers by module names of the running compiled module."""
        layers, name = self.layers, self._scopes.current().module
        if layers is None:
            return None
        return layers._replace(part_of=lambda inner: layers.part_of(f"{name}.{inner}".removeprefix(".")))

    def _program(self, source: Source) -> Program:
        self._programs.append(Program(source, self._tracer, self._scopes, self._tuning, self._copies))
        return self._programs[-1]


def _refusal(error: BaseException) -> InputError | RepeatError | None:
    """Return the error of this package among the causes of Dynamo's, from capture or code generation."""
    chain: list[BaseException] = [error]
    for each in chain:  # Extended below.
        if isinstance(each, InputError | RepeatError):
            return each
        causes = (each.__cause__, each.__context__)
        chain += [cause for cause in causes if cause is not None and cause not in chain]
    return None


def _runnable(call: Callable[[list[Any]], Any]) -> Any:
    from torch._inductor.output_code import OutputCode

    class Runnable(OutputCode):
        def __call__(self, inputs: Any) -> Any:
            return call(inputs)

        def post_compile(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing."""

        def set_triton_bundle(self, triton_bundle: Any) -> None:
            """Do nothing: no kernel was compiled."""

    runnable: Any = Runnable()
    runnable._boxed_call = True  # On the instance, whose attributes Dynamo's wrapper copies.
    return runnable


def _with_room(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


# CPython maps and unmaps a 16 KiB chunk of frames whenever calls cross its end, a third of the compiler's
# time. A frame with a large stack gets a chunk of twice its size, in which all inner calls fit.
_with_room.__code__ = _with_room.__code__.replace(co_stacksize=1 << 17)


@contextmanager
def _no_logs() -> Iterator[None]:
    """Leave out of messages the names of functions, for which Dynamo parses whole files, and graphs."""
    from torch._dynamo import symbolic_convert

    with (
        replaced(symbolic_convert, "get_funcname", lambda *_: None),
        replaced(torch.fx.GraphModule, "print_readable", lambda *_, **__: ""),
    ):
        yield
