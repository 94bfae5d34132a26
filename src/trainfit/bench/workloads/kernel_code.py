"""One kernel from its source to the machine's code: the pointer chase, with the lines that matter.

On a GPU: CUDA C++, the PTX that nvcc makes of it and the SASS that ptxas makes of that; on a CPU: C and the
assembly of the system's compiler. Comments that begin with a number in brackets mark lines of the source; an
instruction belongs to the line that the compiler's line table names.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch

from trainfit.bench.harness.bench import Bench, Point, value
from trainfit.bench.kernels import cc, nvcc
from trainfit.spec.bench import BenchRow
from trainfit.spec.errors import InputError

HOPPER = (9, 0)  # Compiled for where there is no GPU
MARK = re.compile(r"^(?P<code>.*?)\s*// \((?P<number>\d)\) (?P<meaning>.*)$")
LOC = re.compile(r"\s*\.loc\s+(?P<file>\d+)\s+(?P<line>\d+)")
SASS_LINE = re.compile(r'\s*//## File ".*/(?P<file>[^/"]+)", line (?P<line>\d+)')
SASS = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?P<code>.*?)\s*;")
LONGEST_S = 60.0


class Code(NamedTuple):
    """An instruction of one source line; equal ones, as an unrolled loop has, are counted once."""

    mark: int
    text: str
    count: int


def marks(source: Path) -> dict[int, tuple[int, str, str]]:
    """Return the mark, the code and the meaning of each marked line, by its number."""
    found: dict[int, tuple[int, str, str]] = {}
    for number, line in enumerate(source.read_text().splitlines(), 1):
        if match := MARK.match(line):
            found[number] = int(match["number"]), match["code"].strip(), match["meaning"]
    return found


def rows(bench: Bench) -> Iterator[BenchRow]:
    """Yield the marked lines of each stage; in full form a machine without a GPU compiles for one, too."""
    on_gpu = bench.device.type == "cuda"
    if on_gpu or bench.form == "full":
        capability = torch.cuda.get_device_capability(bench.device) if on_gpu else HOPPER
        target = f"sm_{capability[0]}{capability[1]}"
        stages = ("CUDA C++", "PTX", f"SASS {target}")
        yield from _rows(bench, "global_chase", stages, partial(_cuda, capability), _nvcc_version)
    if not on_gpu:
        yield from _rows(bench, "chase", ("C", "assembly"), _c, cc.version)


def _rows(
    bench: Bench, kernel: str, stages: Sequence[str], compile_all: Callable[[], Sequence[Sequence[Code]]],
    compiler: Callable[[], str],
) -> Iterator[BenchRow]:  # fmt: skip
    points: list[Point] = [{"code of": kernel, "in": stage} for stage in stages]

    def of(found: Sequence[Sequence[Code]]) -> Iterator[BenchRow]:
        for point, codes in zip(points, found, strict=True):
            for number, code in enumerate(sorted(codes, key=lambda one: one.mark)):
                made_by = {"made_by": compiler()} if point["in"] != stages[0] else {}
                at: Point = {**point, "mark": code.mark, "line": number}
                yield value(at, text=code.text, count=code.count, **made_by)

    if bench.wanted(points):
        yield from bench.attempt(points, compile_all, of)


@cache
def _nvcc_version() -> str:
    done = subprocess.run([nvcc.nvcc(), "--version"], capture_output=True, text=True, timeout=LONGEST_S)
    found = re.search(r"V([\d.]+)", done.stdout)
    return f"nvcc {found[1]}" if found else "nvcc"


def _of_source(marked: Mapping[int, tuple[int, str, str]]) -> list[Code]:
    return [Code(mark, f"{code}  // {meaning}", 1) for mark, code, meaning in marked.values()]


def _cuda(capability: tuple[int, int]) -> list[list[Code]]:
    source = nvcc.SOURCES / "memory_chase.cu"
    marked = marks(source)
    with tempfile.TemporaryDirectory(prefix="trainfit-code-") as folder:
        ptx, cubin = Path(folder) / "chase.ptx", Path(folder) / "chase.cubin"
        nvcc.compiled("memory_chase", capability, ptx, "-ptx", "-lineinfo")
        nvcc.compiled("memory_chase", capability, cubin, "-cubin", "-lineinfo")
        command = [nvcc.disassembler(), "-g", "-c", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
        if done.returncode != 0:
            raise RuntimeError(f"nvdisasm: {done.stderr.strip().splitlines()[0]}")
        of_ptx = codes(_located_ptx(_between(ptx.read_text(), r"\.entry \w*global_chase", r"^}")), marked)
        of_sass = codes(
            _located_sass(_between(done.stdout, r"^\.text\.\w*global_chase", r"^\s*\.section"), source.name),
            marked,
        )
    return [_of_source(marked), of_ptx, of_sass]


def _c() -> list[list[Code]]:
    source = cc.SOURCES / "memory.c"
    marked = marks(source)
    with tempfile.TemporaryDirectory(prefix="trainfit-code-") as folder:
        assembly = Path(folder) / "memory.s"
        cc.compiled("memory", assembly, "-S", "-g1", "-fno-asynchronous-unwind-tables")
        text = _between(assembly.read_text(), r"^chase:", r"^\s*\.size\s+chase")
    return [_of_source(marked), codes(_located_ptx(text), marked)]


def _between(text: str, first: str, last: str) -> list[str]:
    """Return the lines of one function, between those that match."""
    lines = text.splitlines()
    begin = next((at for at, line in enumerate(lines) if re.search(first, line)), None)
    if begin is None:
        raise InputError("the compiler's output lacks the kernel", "report this with the compiler's version")
    end = next((at for at in range(begin + 1, len(lines)) if re.search(last, lines[at])), len(lines))
    return lines[begin + 1 : end]


def _located_ptx(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield each instruction of PTX or assembly with its source line; 0: of another file."""
    at = 0
    for line in lines:
        code = line.partition("//")[0].strip()
        if match := LOC.match(line):
            at = int(match["line"]) if match["file"] == "1" else 0
        elif code and not code.startswith((".", "{", "}", "(", ")")) and not code.endswith(":"):
            yield at, " ".join(code.rstrip(";").split())


def _located_sass(lines: Sequence[str], source: str) -> Iterator[tuple[int, str]]:
    """Yield each instruction with its source line; 0: of another file."""
    at = 0
    for line in lines:
        if match := SASS_LINE.match(line):
            at = int(match["line"]) if match["file"] == source else 0
        elif match := SASS.match(line):
            yield at, " ".join(match["code"].split())


def codes(located: Iterator[tuple[int, str]], marked: Mapping[int, tuple[int, str, str]]) -> list[Code]:
    """Return the instructions of marked lines; those of one operation in a line once, with their number."""
    found: dict[tuple[int, str], tuple[str, int]] = {}
    for line, text in located:
        if line in marked:
            operation = next(word for word in text.split() if not word.startswith("@"))
            first, count = found.get((line, operation), (text, 0))
            found[line, operation] = first, count + 1
    return [Code(marked[line][0], text, count) for (line, _), (text, count) in found.items()]
