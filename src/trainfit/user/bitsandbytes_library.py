"""bitsandbytes on the virtual GPU: its CUDA operators' own Python code, with a native library that launches
nothing.

An operator of the namespace ``bitsandbytes`` runs the Python code that bitsandbytes registers for CUDA, on
fake tensors under the tracer: it allocates the same tensors as on a GPU. The functions of the native library
that it calls are entries in the ledger, with the bytes and the FLOPs that follow from their arguments. Paged
optimizer states are managed memory, which is counted as memory of the host.
"""

import importlib
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from trainfit.spec.errors import InputError
from trainfit.user.tracer import UserTracer
from trainfit.virtual import torch_internals
from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.scope import NO_SCOPE
from trainfit.virtual.trace.tensors import tensors_of

NAME = "bitsandbytes"
FLOATS = {"fp32": ("float32", 4), "fp16": ("float16", 2), "bf16": ("bfloat16", 2)}
"""bitsandbytes' name of a dtype -> PyTorch's name, and bytes of an element."""
NOTHING = ("cprefetch", "cfill", "get_context", "get_cusparse")
"""Functions of the native library that are not recorded, as are those about the host (``has_..._cpu``)."""
SCALE_BYTES = 4
"""Bytes of a block's scale, its largest value (absmax)."""
PAGED = (
    "paged optimizer states of bitsandbytes: managed memory, counted as memory of the host; on a GPU they "
    "stay on the device as long as there is room"
)


@contextmanager
def bitsandbytes_library(tracer: UserTracer) -> Iterator["BitsAndBytes"]:
    """Let bitsandbytes be imported and run on the virtual GPU; without effect if it is not imported."""
    logger = logging.getLogger(NAME)
    level = logger.level
    with ExitStack() as stack:
        # Its binaries for CUDA cannot be loaded without CUDA, and are not needed.
        stack.callback(logger.setLevel, level)
        logger.setLevel(logging.CRITICAL + 1)
        library = BitsAndBytes(tracer, stack)
        tracer.libraries[NAME] = library.run
        yield library


class BitsAndBytes:
    """Runs bitsandbytes' operators; from the first use on its native library is ``NativeLibrary``."""

    def __init__(self, tracer: UserTracer, stack: ExitStack):
        self._tracer, self._stack = tracer, stack
        self._is_ready = False

    def before_optimizer(self, optimizer: Any) -> None:
        """Get ready for an optimizer of bitsandbytes: its paged states call the native library directly."""
        if any(base.__module__.partition(".")[0] == NAME for base in type(optimizer).__mro__):
            self.get_ready()

    def get_ready(self) -> None:
        """Replace the native library and bitsandbytes' cached facts of a GPU, until the trace ends."""
        if self._is_ready:
            return
        self._is_ready = True
        torch_internals.require("bitsandbytes")
        functional: Any = importlib.import_module(f"{NAME}.functional")
        operators: Any = importlib.import_module(f"{NAME}.backends.cuda.ops")
        native = NativeLibrary(self._tracer)
        enter = self._stack.enter_context
        for module in (functional, operators):
            enter(replaced(module, "lib", native))
        if hasattr(operators, "_get_raw_stream"):
            enter(replaced(operators, "_get_raw_stream", lambda device=0: 0))
        for owner in (functional.CUBLAS_Context, functional.GlobalPageManager):
            enter(replaced(owner, "_instance", None))
        enter(replaced(functional, "name2qmap", {}))
        self._stack.callback(_clear_caches, operators)
        _clear_caches(operators)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on device tensors."""
        self.get_ready()
        if "optimizer_update" in func._schema.name:
            self._update(func, args, kwargs)
            return None
        kernel = _kernel_key(func)
        if kernel is None:
            raise InputError(
                f"bitsandbytes has no CUDA kernel of {func}", "use another of its functions", field="step",
                value=str(func),
            )  # fmt: skip
        with self._tracer.python_body():
            return func.redispatch(torch._C.DispatchKeySet(kernel), *args, **kwargs)

    def _update(self, func: Any, args: Any, kwargs: Any) -> None:
        """Record an optimizer's kernel: it reads the gradient, reads and writes the weight and the states."""
        gradient, *others = tensors_of((args, kwargs))
        with torch._C.DisableTorchFunction(), self._tracer.inside():
            num_bytes = gradient.nbytes + 2 * sum(t.nbytes for t in others)
            dtype = str(gradient.dtype).removeprefix("torch.")
        self._tracer.launched(str(func), num_bytes, dtype)


class NativeLibrary:
    """``bitsandbytes.cextension.lib``: its functions are recorded, or allocate managed memory."""

    compiled_with_cuda = True

    def __init__(self, tracer: UserTracer):
        self._tracer = tracer
        self._managed: list[np.ndarray[Any, Any]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith(NOTHING) or name.endswith("_cpu"):
            return lambda *args: 0
        if name == "cget_managed_ptr":
            return self._managed_memory
        record = next((RECORDS[start] for start in RECORDS if name.startswith(start)), None)

        def call(*args: Any) -> int:
            if record is None:
                raise InputError(
                    f"{name} of bitsandbytes' native library is not modelled", "use another of its functions",
                    field="step", value=name,
                )  # fmt: skip
            num_bytes, dtype, product = record(name, [getattr(arg, "value", arg) for arg in args])
            self._tracer.launched(f"{NAME}.{name}", num_bytes, dtype, product)
            return 0

        return call

    def _managed_memory(self, size: Any) -> int:
        """Return the address of memory of the host, which takes none before it is written."""
        num_bytes = getattr(size, "value", size)
        memory = np.zeros(num_bytes, dtype=np.uint8)
        self._managed.append(memory)
        with _disable_current_modes():
            self._tracer.own_host(torch.empty(num_bytes, dtype=torch.uint8, device="meta"), NO_SCOPE)
        self._tracer.notes.add(PAGED)
        return int(memory.ctypes.data)


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


def _kernel_key(func: Any) -> Any:
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
