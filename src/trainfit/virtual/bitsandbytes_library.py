"""bitsandbytes' operators on the virtual GPU: its code for CUDA, with a native library that launches nothing.

An operator of the namespace ``bitsandbytes`` runs the Python code that is registered for CUDA on fake tensors
under the tracer: it allocates the same tensors as on a GPU. The functions of the native library that it calls
are entries in the ledger, with the bytes and the FLOPs that follow from their arguments.
"""

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from trainfit.spec.errors import InputError
from trainfit.virtual import torch_internals
from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.tracer import Tracer

NAME = "bitsandbytes"
FLOATS = {"fp32": ("float32", 4), "fp16": ("float16", 2), "bf16": ("bfloat16", 2)}
"""bitsandbytes' name of a dtype -> PyTorch's name, and bytes of an element."""
NOTHING = ("cprefetch", "cfill", "get_context", "get_cusparse")
"""Functions of the native library that are not recorded, as are those about the host (``has_..._cpu``)."""
SCALE_BYTES = 4
"""Bytes of a block's scale, its largest value (absmax)."""
PYTHON_BODIES = ("4bit", "quantize_blockwise")
"""Parts of the names of the operators that a recipe's step runs by their Python code."""


@contextmanager
def replaced_library(native: Any) -> Iterator[None]:
    """Replace bitsandbytes' native library and what it remembers of a GPU."""
    functional: Any = importlib.import_module(f"{NAME}.functional")
    operators = _cuda_operators()
    torch_internals.require("bitsandbytes")
    with ExitStack() as stack:
        enter = stack.enter_context
        for module in (functional, operators):
            enter(replaced(module, "lib", native))
        if hasattr(operators, "_get_raw_stream"):
            enter(replaced(operators, "_get_raw_stream", lambda device=0: 0))
        for owner in (functional.CUBLAS_Context, functional.GlobalPageManager):
            enter(replaced(owner, "_instance", None))
        enter(replaced(functional, "name2qmap", {}))
        stack.callback(_clear_caches, operators)
        _clear_caches(operators)
        yield


def _cuda_operators() -> Any:
    """Import the module that registers the kernels for CUDA, which PyTorch without CUDA lacks a name for."""
    is_there = hasattr(torch._C, "_cuda_getCurrentRawStream")
    no_stream = replaced(torch._C, "_cuda_getCurrentRawStream", lambda device=0: 0)
    with nullcontext() if is_there else no_stream:
        return importlib.import_module(f"{NAME}.backends.cuda.ops")


class RecipeOperators:
    """Runs the operators of 4-bit layers in a recipe's step, whose device tensors are fake CPU tensors."""

    def __init__(self, tracer: Tracer, stack: ExitStack):
        self._tracer, self._stack = tracer, stack
        self._is_ready = False

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, or return NotImplemented for those that are recorded as one."""
        if not any(part in func._schema.name for part in PYTHON_BODIES):
            return NotImplemented
        if not self._is_ready:
            self._is_ready = True
            self._get_ready()
        kernel = kernel_key(func)
        assert kernel is not None, func
        with self._tracer.python_body(), replaced(Tensor, "data_ptr", _address):
            return func.redispatch(torch._C.DispatchKeySet(kernel), *args, **kwargs)

    def _get_ready(self) -> None:
        enter, gpu = self._stack.enter_context, self._tracer.gpu
        assert gpu is not None
        enter(replaced_library(NativeLibrary(self._tracer.launched)))
        # PEFT's layers for bitsandbytes ask without a device, which means CUDA's autocast.
        enter(replaced(torch, "is_autocast_enabled", _is_autocast_enabled))
        operators = _cuda_operators()
        if hasattr(operators, "_gpu_dispatch_props"):
            properties = gpu.num_sms, *gpu.compute_capability
            enter(replaced(operators, "_gpu_dispatch_props", lambda index: properties))


def _is_autocast_enabled(device_type: str = "cpu") -> bool:
    return IS_AUTOCAST_ENABLED("cpu" if device_type == "cuda" else device_type)


def _address(t: Tensor) -> int:
    """Return a tensor's address; a fake one has none."""
    return 0 if isinstance(t, FakeTensor) else ADDRESS(t)


ADDRESS: Callable[[Tensor], int] = Tensor.data_ptr
IS_AUTOCAST_ENABLED: Callable[[str], bool] = torch.is_autocast_enabled


class NativeLibrary:
    """``bitsandbytes.cextension.lib``: its functions are recorded, or allocate managed memory."""

    compiled_with_cuda = True

    def __init__(self, launched: Callable[..., None], managed: Callable[[Any], int] | None = None):
        self._launched, self._managed = launched, managed

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith(NOTHING) or name.endswith("_cpu"):
            return lambda *args: 0
        if name == "cget_managed_ptr" and self._managed is not None:
            return self._managed
        record = next((RECORDS[start] for start in RECORDS if name.startswith(start)), None)

        def call(*args: Any) -> int:
            if record is None:
                raise InputError(
                    f"{name} of bitsandbytes' native library is not modelled", "use another of its functions",
                    field="step", value=name,
                )  # fmt: skip
            num_bytes, dtype, product = record(name, [getattr(arg, "value", arg) for arg in args])
            self._launched(f"{NAME}.{name}", num_bytes, dtype, product)
            return 0

        return call


Record = tuple[int, str, tuple[int, ...]]
"""Bytes read and written, dtype, and of a matrix product its batch, m, n and k."""


def _blocks(name: str, args: list[Any]) -> Record:
    """(code, input, absmax, output, block, elements): quantize to, or from, 8 bits or 4."""
    block, numel = args[4:6]
    dtype, size = FLOATS[next(part for part in name.split("_") if part in FLOATS)]
    quantized = numel // 2 if name.endswith(("_nf4", "_fp4")) else numel
    return quantized + SCALE_BYTES * math.ceil(numel / block) + numel * size, dtype, ()


def _gemm(name: str, args: list[Any]) -> Record:
    """(8 pointers, m, n, k, block): a product with a 4-bit weight [n, k]."""
    m, n, k, block = args[8:12]
    dtype, size = FLOATS[name.rpartition("_")[2]]
    weight = n * k // 2 + SCALE_BYTES * math.ceil(n * k / block)
    return weight + (m * k + m * n) * size, dtype, (1, m, n, k)


def _gemv(name: str, args: list[Any]) -> Record:
    """(m, n, k, ...): a product of a vector [k] with a 4-bit weight [m, k]."""
    m, _, k = args[:3]
    dtype, size = FLOATS[name.rpartition("_")[2]]
    return m * k // 2 + (m + k) * size, dtype, (1, m, 1, k)


def _int8_product(name: str, args: list[Any]) -> Record:
    """(context, m, n, k, ...): 8-bit inputs, 32-bit output."""
    m, n, k = args[1:4]
    return m * k + n * k + 4 * m * n, "int8", (1, m, n, k)


def _int8_output(name: str, args: list[Any]) -> Record:
    """(input, 2 scales, output, bias, rows, columns): 32-bit integers to fp16."""
    rows, columns = args[5:7]
    return rows * columns * (4 + 2) + SCALE_BYTES * (rows + columns), "float16", ()


def _int8_rows(name: str, args: list[Any]) -> Record:
    """(input, output, scales, threshold, rows, columns): fp16 to 8 bits."""
    rows, columns = args[4:6]
    return rows * columns * (2 + 1) + SCALE_BYTES * rows, "float16", ()


RECORDS: dict[str, Callable[[str, list[Any]], Record]] = {
    "cgemm_4bit_inference_naive": _gemv,
    "cgemm_4bit": _gemm,
    "cquantize_blockwise": _blocks,
    "cdequantize_blockwise": _blocks,
    "cigemmlt_32": _int8_product,
    "cdequant_mm_int32_fp16": _int8_output,
    "cint8_vector_quant": _int8_rows,
}
"""Prefix of a native function's name -> the function that returns its bytes and FLOPs."""


def kernel_key(func: Any) -> Any:
    """Return the dispatch key of the operator's kernel on CUDA, of the library's own or for all devices."""
    keys = torch._C.DispatchKey
    for key, name in ((keys.CUDA, "CUDA"), (keys.CompositeExplicitAutograd, "CompositeExplicitAutograd")):
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), name):
            return key
    return None


def _clear_caches(module: Any) -> None:
    for value in vars(module).values():
        if not isinstance(value, NativeLibrary) and hasattr(value, "cache_clear"):
            value.cache_clear()
