"""``kept += scale * A B^T`` of fp8 codes by cuBLASLt's C API, which ``torch._scaled_mm`` has no beta for.

cuBLASLt takes matrices by columns, so it is asked for the transposed product: ``kept`` [o, i] by rows is a
matrix [i, o] by columns, and codes [rows, n] by rows are [n, rows] by columns. fp8 products take the first
factor transposed and the second as it is, both with the summed dimension n contiguous: ``op(x)^T d``.

Names and values are those of NVIDIA's ``cublasLt.h`` (the same in CUDA 12 and 13). Descriptors live on the
host; a product needs a GPU from Ada on.
"""

import ctypes
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainfit.spec.errors import InputError

WORKSPACE_BYTES = 32 << 20
"""As torch's own for cuBLASLt on Hopper (``parseChosenWorkspaceSize`` in CublasHandlePool.cpp)."""

COMPUTE_32F = 68  # cublasComputeType_t
TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
"""cudaDataType, of library_types.h."""
DESC_TRANSA, DESC_A_SCALE_POINTER, DESC_B_SCALE_POINTER, DESC_FAST_ACCUM = 3, 17, 18, 25
PREF_MAX_WORKSPACE_BYTES, PREF_MIN_ALIGNMENTS = 1, (5, 6, 7, 8)  # The latter of A, B, C and D
OP_TRANSPOSED = 1  # cublasOperation_t
MOST_ALIGNMENT = 256


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("data", c_uint64 * 8),)


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", Algorithm), ("workspace_bytes", c_size_t), ("state", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    )  # fmt: skip


class Shape(NamedTuple):
    """Everything that the choice of an algorithm depends on; alignments in bytes."""

    outputs: int
    inputs: int
    tokens: int
    kept_stride: int
    gradient_dtype: torch.dtype
    x_dtype: torch.dtype
    kept_dtype: torch.dtype
    fast: bool
    alignments: tuple[int, int, int]
    """Of x, the gradient, and kept."""


class Product:
    """Descriptors of one shape of products. They are never destroyed, as a model has few shapes."""

    def __init__(self, shape: Shape):
        """Create them; nothing here touches a GPU."""
        self.shape, self.operation = shape, c_void_p()
        call("cublasLtMatmulDescCreate", byref(self.operation), COMPUTE_32F, TYPES[torch.float32])
        self.set(DESC_TRANSA, c_int32(OP_TRANSPOSED))
        self.set(DESC_FAST_ACCUM, c_int8(shape.fast))
        self.x = layout(shape.x_dtype, shape.tokens, shape.inputs, shape.tokens)
        self.gradient = layout(shape.gradient_dtype, shape.tokens, shape.outputs, shape.tokens)
        self.kept = layout(shape.kept_dtype, shape.inputs, shape.outputs, shape.kept_stride)

    def set(self, attribute: int, value: Any) -> None:
        """Set an attribute of the operation."""
        size = c_size_t(ctypes.sizeof(value))
        call("cublasLtMatmulDescSetAttribute", self.operation, attribute, byref(value), size)

    def get(self, attribute: int, kind: Any) -> Any:
        """Return an attribute of the operation as a value of a ctypes type."""
        value, written = kind(), c_size_t()
        size = c_size_t(ctypes.sizeof(value))
        call("cublasLtMatmulDescGetAttribute", self.operation, attribute, byref(value), size, byref(written))
        return value.value

    def set_scales(self, x_scale: int, gradient_scale: int) -> None:
        """Set the addresses of the factors' scales, fp32 on the device."""
        self.set(DESC_A_SCALE_POINTER, c_void_p(x_scale))
        self.set(DESC_B_SCALE_POINTER, c_void_p(gradient_scale))

    def algorithm(self, handle: c_void_p) -> Algorithm:
        """Return the algorithm that cuBLASLt expects to be the fastest.

        Raises:
            RuntimeError: It has none for these sizes, dtypes and alignments.
        """
        preference = c_void_p()
        call("cublasLtMatmulPreferenceCreate", byref(preference))
        x, gradient, kept = self.shape.alignments
        aligned = zip(PREF_MIN_ALIGNMENTS, (x, gradient, kept, kept), strict=True)
        values = [(PREF_MAX_WORKSPACE_BYTES, c_uint64(WORKSPACE_BYTES))]
        values += [(attribute, c_uint32(num_bytes)) for attribute, num_bytes in aligned]
        for attribute, value in values:
            size = c_size_t(ctypes.sizeof(value))
            call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, byref(value), size)
        found, num_found = HeuristicResult(), c_int()
        try:
            call(
                "cublasLtMatmulAlgoGetHeuristic", handle, self.operation, self.x, self.gradient, self.kept,
                self.kept, preference, 1, byref(found), byref(num_found),
            )  # fmt: skip
        finally:
            call("cublasLtMatmulPreferenceDestroy", preference)
        if not num_found.value or found.state:
            raise RuntimeError(f"cuBLASLt has no algorithm for an fp8 product with a sum: {self.shape}")
        return found.algo


def add(
    kept: Tensor, gradient: Tensor, gradient_scale: Tensor, x: Tensor, x_scale: Tensor, *, fast: bool
) -> None:
    """Add ``gradient_scale * x_scale * gradient x^T`` to ``kept`` on the current stream.

    Args:
        kept: bf16 [o, i], its rows contiguous.
        gradient: codes [o, n], contiguous.
        gradient_scale: fp32 [1] on the same device.
        x: codes [i, n], contiguous; it or the gradient is e4m3.
        x_scale: as the gradient's.
        fast: as ``use_fast_accum`` of ``torch._scaled_mm``.
    """
    if not (gradient.is_contiguous() and x.is_contiguous() and kept.stride(1) == 1):
        raise ValueError("an fp8 product that adds takes contiguous codes and a sum with contiguous rows")
    (outputs, tokens), inputs = gradient.shape, x.shape[0]
    alignments = alignment(x), alignment(gradient), alignment(kept)
    dtypes = gradient.dtype, x.dtype, kept.dtype
    shape = Shape(outputs, inputs, tokens, kept.stride(0), *dtypes, fast, alignments)
    # Of this stream: the allocator gives the memory to no other stream before the product is done.
    with torch.cuda.device(kept.device):
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=kept.device)
        stream = torch.cuda.current_stream().cuda_stream
        handle, product, algorithm = planned(kept.device.index, shape)
        one = c_float(1)
        with _LOCK:  # Forward and backward are threads of their own, and share the scales' addresses.
            product.set_scales(x_scale.data_ptr(), gradient_scale.data_ptr())
            call(
                "cublasLtMatmul", handle, product.operation, byref(one),
                c_void_p(x.data_ptr()), product.x, c_void_p(gradient.data_ptr()), product.gradient,
                byref(one), c_void_p(kept.data_ptr()), product.kept, c_void_p(kept.data_ptr()), product.kept,
                byref(algorithm), c_void_p(workspace.data_ptr()), c_size_t(WORKSPACE_BYTES), c_void_p(stream),
            )  # fmt: skip


_LOCK = Lock()


@cache
def planned(device: int, shape: Shape) -> tuple[c_void_p, Product, Algorithm]:
    """Return the device's handle, the descriptors of a shape, and the algorithm."""
    product, handle = Product(shape), handle_of(device)
    return handle, product, product.algorithm(handle)


@cache
def handle_of(device: int) -> c_void_p:
    """Create the handle of a device, which must be the current one."""
    handle = c_void_p()
    call("cublasLtCreate", byref(handle))
    return handle


def layout(dtype: torch.dtype, rows: int, columns: int, stride: int) -> c_void_p:
    """Describe a matrix by columns, ``stride`` elements apart."""
    found = c_void_p()
    sizes = c_uint64(rows), c_uint64(columns), c_int64(stride)
    call("cublasLtMatrixLayoutCreate", byref(found), TYPES[dtype], *sizes)
    return found


def alignment(x: Tensor) -> int:
    """Return the largest power of two, up to 256, that the address is a multiple of."""
    address = x.data_ptr()
    return min(address & -address or MOST_ALIGNMENT, MOST_ALIGNMENT)


def call(name: str, *arguments: Any) -> None:
    """Call a function of the library.

    Raises:
        RuntimeError: It returns another status than success.
    """
    status = getattr(library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} of cuBLASLt returned status {status}")


@cache
def library() -> ctypes.CDLL:
    """Load the library that torch multiplies with; where torch has loaded it, this is the same one.

    Raises:
        InputError: There is none.
    """
    major = (torch.version.cuda or "").partition(".")[0]
    if major:
        try:
            return ctypes.CDLL(f"libcublasLt.so.{major}")
        except OSError:
            pass  # The refusal says it.
    raise InputError(
        "fp8 products that add to the gradients need libcublasLt of torch's CUDA build, which is not loaded",
        "use accumulation: standard" + ("" if torch.version.hip else ", or install a CUDA build of torch"),
        field="accumulation",
        value="fused",
    )
