"""Build C at run time: the system's compiler makes a library of a source of ``c/`` that ``ctypes`` calls."""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from trainfit.spec.errors import InputError

SOURCES = Path(__file__).parent / "c"
COMPILERS = ("cc", "gcc", "clang")
OPTIONS = ("-O3", "-march=native")
BUILD_LIMIT_S = 60.0


def compiler() -> str:
    """Return the C compiler on the path."""
    for name in COMPILERS:
        if found := shutil.which(name):
            return found
    raise InputError("this needs a C compiler, and this machine has none", "install gcc or clang")


@cache
def version() -> str:
    """Return the compiler's name and version, as it prints them."""
    done = subprocess.run([compiler(), "--version"], capture_output=True, text=True, timeout=BUILD_LIMIT_S)
    return (done.stdout.splitlines() or [Path(compiler()).name])[0]


def compiled(name: str, into: Path, *kind: str) -> None:
    """Compile ``c/NAME.c`` for this CPU; ``kind``: options of the output, as ``-shared``."""
    command = [compiler(), *OPTIONS, *kind, "-o", str(into), str(SOURCES / f"{name}.c")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT_S)
    if done.returncode != 0:
        lines = done.stderr.splitlines()
        first = next((line for line in lines if "error" in line.lower()), f"exit code {done.returncode}")
        raise RuntimeError(f"{Path(command[0]).name}: {first}")


@cache
def library(name: str) -> ctypes.CDLL:
    """Return the library of ``c/NAME.c``, built once a process; its file is deleted after loading."""
    with tempfile.TemporaryDirectory(prefix="trainfit-cc-") as folder:
        made = Path(folder) / f"{name}.so"
        compiled(name, made, "-shared", "-fPIC")
        return ctypes.CDLL(str(made))
