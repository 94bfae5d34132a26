"""Build CUDA C++ at run time: nvcc compiles a source of ``cuda/`` to a library that ``ctypes`` calls.

No PyTorch header is compiled, so it takes a second or two and needs neither ninja nor a matching C++ library.
The code is for the one GPU it will run on. Its runtime shares the primary context with PyTorch's, so
PyTorch's pointers and streams are its own.
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from trainfit.spec.errors import InputError

SOURCES = Path(__file__).parent / "cuda"
BUILD_LIMIT_S = 300.0


def nvcc() -> str:
    """Return the compiler: on the path, in ``CUDA_HOME``, or where CUDA's installer puts it."""
    folders = (os.environ.get("PATH", ""), f"{os.environ.get('CUDA_HOME', '')}/bin", "/usr/local/cuda/bin")
    for folder in folders:
        found = shutil.which("nvcc", path=folder)
        if found:
            return found
    why = "CUDA C++ needs nvcc, and this machine has none"
    raise InputError(why, "install CUDA's compiler or set CUDA_HOME")


def disassembler() -> str:
    """Return nvdisasm: next to nvcc, on the path, or as Triton's package brings it."""
    folders = [str(Path(nvcc()).parent), os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    if (triton := importlib.util.find_spec("triton")) is not None and triton.origin is not None:
        folders.append(str(Path(triton.origin).parent / "backends/nvidia/bin"))
    for folder in folders:
        if found := shutil.which("nvdisasm", path=folder):
            return found
    raise InputError("SASS needs nvdisasm, and this machine has none", "install CUDA's binary utilities")


def compiled(name: str, capability: tuple[int, int], into: Path, *kind: str) -> None:
    """Compile ``cuda/NAME.cu`` for one compute capability; ``kind``: options of the output, as ``-cubin``."""
    number = f"{capability[0]}{capability[1]}"
    target = f"-gencode=arch=compute_{number},code=sm_{number}"
    command = [nvcc(), "-O3", "-std=c++17", target, *kind, "-o", str(into), str(SOURCES / f"{name}.cu")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT_S)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).splitlines()
        first = next((line for line in lines if "error" in line.lower()), f"exit code {done.returncode}")
        raise RuntimeError(f"nvcc: {first}")


@cache
def library(name: str, capability: tuple[int, int]) -> ctypes.CDLL:
    """Return the library of ``cuda/NAME.cu``, built once a process; its file is deleted after loading."""
    with tempfile.TemporaryDirectory(prefix="trainfit-nvcc-") as folder:
        made = Path(folder) / f"{name}.so"
        compiled(name, capability, made, "-shared", "-Xcompiler", "-fPIC")
        return ctypes.CDLL(str(made))


def launch(name: str, *arguments: Tensor | ctypes._SimpleCData, source: str = "") -> None:
    """Call the function NAME of ``cuda/SOURCE.cu`` in the current stream of the first argument's GPU.

    Args:
        arguments: tensors, passed as pointers, and C values.
        source: empty: the function's name.
    """
    device = next(one.device for one in arguments if isinstance(one, Tensor))
    passed = [ctypes.c_void_p(one.data_ptr()) if isinstance(one, Tensor) else one for one in arguments]
    with torch.cuda.device(device):
        built = library(source or name, torch.cuda.get_device_capability(device))
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        error = getattr(built, name)(*passed, stream)
    if error != 0:
        raise RuntimeError(f"{name}: CUDA error {error} (cudaError_t)")
