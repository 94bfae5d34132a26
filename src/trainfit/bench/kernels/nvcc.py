"""Build CUDA C++ at run time: nvcc compiles a source of ``cuda/`` to a library that ``ctypes`` calls.

No PyTorch header is compiled, so it takes a second or two and needs neither ninja nor a matching C++ library.
The code is for the one GPU it will run on. Its runtime shares the primary context with PyTorch's, so
PyTorch's pointers and streams are its own.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from trainfit.spec.errors import InputError

SOURCES = Path(__file__).parent / "cuda"
BUILD_LIMIT_S = 300.0


def nvcc() -> str:
    """Return the compiler: on the path, in ``CUDA_HOME``, or where CUDA's installer puts it.

    Raises:
        InputError: there is none.
    """
    folders = (os.environ.get("PATH", ""), f"{os.environ.get('CUDA_HOME', '')}/bin", "/usr/local/cuda/bin")
    for folder in folders:
        found = shutil.which("nvcc", path=folder)
        if found:
            return found
    raise InputError(
        "CUDA C++ needs nvcc, and this machine has none", "install CUDA's compiler or set CUDA_HOME"
    )


def compiled(name: str, capability: tuple[int, int], into: Path, *kind: str) -> None:
    """Compile ``cuda/NAME.cu`` for one compute capability.

    Args:
        kind: nvcc's options for the kind of output, such as ``-cubin``.

    Raises:
        InputError: there is no nvcc.
        RuntimeError: it failed; its first error.
    """
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


def check(error: int, what: str) -> None:
    """Check the cudaError_t that a function returned.

    Raises:
        RuntimeError: it is an error.
    """
    if error != 0:
        raise RuntimeError(f"{what}: CUDA error {error} (cudaError_t)")
