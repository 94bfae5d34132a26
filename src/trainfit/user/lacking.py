"""Name the feature that the virtual GPU lacks where its absence raised an exception in user code."""

import re
import traceback
from pathlib import Path

from torch._subclasses import fake_tensor

OWN = Path(__file__).parents[1]
LIBRARIES = ("site-packages", "dist-packages", str(OWN), "<", str(Path(traceback.__file__).parent))
"""Parts of the paths of code that is not the user's."""
DRIVER = re.compile(
    r"no attribute '_(?:cuda|nccl|cudnn|accelerator)_?\w*'|dummy base class|not compiled with CUDA|"
    r"not linked with support for cuda|no NVIDIA driver|No CUDA GPUs|accelerator device when none|"
    r"requires CUDA support|CUDA driver|Cannot initialize CUDA|cudaError|CUDA error",
    re.IGNORECASE,
)
"""Messages of PyTorch without a GPU."""
LIBRARY = re.compile(r"(lib(?:cuda|cudart|nvrtc|cublas|nvidia-ml|nccl)[\w.-]*)")
HIGHER_ORDER = re.compile(r"no rule registered for HigherOrderOperator (\w+)")
POINTER = re.compile(r"data pointer|data_ptr|FakeTensor.*NumPy", re.IGNORECASE)
LAZY = re.compile(r"uninitialized parameter", re.IGNORECASE)
NO_KERNEL = re.compile(
    r"(?:Could not run|no fake impl|implement.{0,40}for operator|operator) '?([\w:.]+::[\w.]+)'?",
    re.IGNORECASE,
)


def lack_of(error: BaseException) -> str | None:
    """Return a clause that names the missing feature if its absence raised the exception; else None."""
    text = str(error)
    if isinstance(error, fake_tensor.DataDependentOutputException | fake_tensor.DynamicOutputShapeException):
        return f"the result of {error.func} depends on values, which the virtual GPU does not compute"
    if isinstance(error, fake_tensor.UnsupportedOperatorException):
        return (
            f"{error.func} has no fake kernel (torch.library.register_fake), by which the virtual GPU runs it"
        )
    if type(error).__name__.startswith("NVMLError"):
        return f"{_called(error, 'pynvml') or 'NVML'} is not modelled by the virtual GPU"
    if found := HIGHER_ORDER.search(text):
        return f"the higher-order operator {found[1]} is not modelled by the virtual GPU"
    if DRIVER.search(text):
        return f"{_called(error, 'torch') or 'a call of the CUDA driver'} is not modelled by the virtual GPU"
    if isinstance(error, OSError | ImportError | AssertionError) and (found := LIBRARY.search(text)):
        return f"{found[1]}, a library of a machine with a GPU, is not modelled by the virtual GPU"
    if isinstance(error, NotImplementedError) and (found := NO_KERNEL.search(text)):
        return (
            f"{found[1]} has no fake kernel (torch.library.register_fake), by which the virtual GPU runs it"
        )
    if isinstance(error, RuntimeError | ValueError) and LAZY.search(text):
        return "a lazy module (nn.LazyLinear): parameters without a shape are not modelled by the virtual GPU"
    if isinstance(error, RuntimeError | ValueError) and POINTER.search(text):
        return "code that reads a tensor's memory by its address is not modelled by the virtual GPU"
    return None


def line_of(error: BaseException) -> str:
    """Return file and line of the innermost call in the user's own code; empty: there is none."""
    calls = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_users(frame.f_code.co_filename)
    ]
    return calls[-1] if calls else ""


def _is_users(file: str) -> bool:
    return not any(part in file for part in LIBRARIES)


def _called(error: BaseException, package: str) -> str:
    """Return the function of a package that the user's code called last; empty: none."""
    name, is_inside = "", False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] == package:
            name = name if is_inside else f"{module}.{frame.f_code.co_qualname}"
            is_inside = True
        elif _is_users(frame.f_code.co_filename):
            is_inside = False
    return name
