"""``VirtualCompiler``: what ``assemble`` is given to compile modules with on the virtual GPU."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from trainfit.spec.errors import InputError
from trainfit.virtual.compile.generate import Source, generate
from trainfit.virtual.compile.joint_graph import cuda_choices, decompositions
from trainfit.virtual.compile.program import Program
from trainfit.virtual.compile.tuning import Tuning
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.trace.repeated_layers import signature
from trainfit.virtual.trace.scope import ScopeTracker
from trainfit.virtual.trace.tracer import Tracer


class VirtualCompiler:
    """``compiler(module)`` compiles a module in place, as ``module.compile()`` does on a GPU.

    The module is captured when it is first called, for each set of guards once, by Dynamo's own rules. A context
    manager: what Dynamo remembers of modules on this virtual GPU is forgotten at the end.
    """

    def __init__(self, gpu: GpuTraits | None, tracer: Tracer, scopes: ScopeTracker):
        self._gpu, self._tracer, self._scopes = gpu, tracer, scopes
        self._tuning = Tuning(gpu.l2_cache_bytes) if gpu else None
        self._used = False
        self.num_graphs = 0
        """Graphs captured so far."""
        self._signatures: set[Any] = set()

    def __call__(self, module: nn.Module) -> None:
        if not self._used:
            torch._dynamo.reset()
            self._used = True
        self._signatures.add(signature(module))
        module.compile(backend=self._backend)
        compiled: Any = module._compiled_call_impl
        module._compiled_call_impl = partial(self._run, module, compiled)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._used:
            torch._dynamo.reset()

    def captures_each_layer(self) -> bool:
        """Equal modules got graphs of their own, for more than a first one that differs.

        Then Dynamo's limit of graphs for one function counts, and the number of layers with it.
        """
        return self.num_graphs > 2 * len(self._signatures)

    def assumptions(self) -> tuple[str, ...]:
        """What a prediction of compiled code rests on."""
        if not self.num_graphs:
            return ()
        return (
            f"compiled code: the programs that torch {torch.__version__}'s Inductor writes for this GPU; matrix products "
            "and attention by the same libraries as without compiling; in the first step kernels are tuned, as nothing was "
            "compiled on the machine before",
        )

    def _run(self, module: nn.Module | None, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        num_graphs = self.num_graphs
        try:
            with self._scopes.within_compiled(module), _no_function_modes():
                return _with_room(compiled, *args, **kwargs)
        except TorchDynamoException as error:
            refused = _refusal(error)
            if refused is None:
                raise
            raise refused from None
        finally:
            if self.num_graphs != num_graphs:
                # Capturing leaves reference cycles, and here they hold what a graph was captured with.
                gc.collect()

    def _backend(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        from torch._functorch import config as functorch_config
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        self.num_graphs += 1
        # What a real run left in the caches is a program for a real device.
        settings = functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True)
        choices = cuda_choices() if self._gpu else nullcontext()
        table = decompositions() if self._gpu else None
        # Worker processes, once they are warm, would begin to compile kernels as these are written.
        inductor_settings = config.patch(force_disable_caches=True, compile_threads=1)
        with settings, inductor_settings, choices:
            return compile_fx(gm, list(example_inputs), inner_compile=self._inner, decompositions=table)

    def _inner(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **graph_kwargs: Any) -> Any:
        graph_kwargs.pop("compile_region_name", None)  # since 2.13, a name for profiles
        compiled = generate(gm, example_inputs, self._gpu, graph_kwargs, self._program)
        return _runnable(compiled.current_callable)

    def _program(self, source: Source) -> Program:
        return Program(source, self._tracer, self._scopes, self._tuning)


def _refusal(error: BaseException) -> InputError | None:
    """The InputError that an operation raised while it was captured: Dynamo tells it in an error of its own."""
    chain: list[BaseException] = [error]
    for told in chain:  # It grows.
        if isinstance(told, InputError):
            return told
        causes = (told.__cause__, told.__context__)
        chain += [cause for cause in causes if cause is not None and cause not in chain]
    return None


def _runnable(call: Callable[[list[Any]], Any]) -> Any:
    from torch._inductor.output_code import OutputCode

    class Runnable(OutputCode):
        def __call__(self, inputs: Any) -> Any:
            return call(inputs)

        def post_compile(self, *args: Any, **kwargs: Any) -> None:
            """Nothing is left to do."""

        def set_triton_bundle(self, triton_bundle: Any) -> None:
            """No kernel was compiled."""

    runnable: Any = Runnable()
    runnable._boxed_call = True  # on the instance: Dynamo wraps it and copies what it finds there
    return runnable


def _with_room(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


# CPython keeps frames in chunks of 16 KiB, mapped when a call needs one and unmapped when it returns; a compiler that
# calls across such a border all the time maps a million of them, a third of its time. A frame that asks for a large
# stack gets a chunk of twice its size, and all calls within find room there.
_with_room.__code__ = _with_room.__code__.replace(co_stacksize=1 << 17)


@contextmanager
def _no_function_modes() -> Iterator[None]:
    """Dynamo would trace a TorchFunctionMode into the graph."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)
