"""Every Triton kernel of ours compiles for an H200, from the very arguments that its launcher gives it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_runs import loops

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src/trainfit"
MOST_SHARED_BYTES = 227 * 1024
"""Of one block of threads (CUDA programming guide, technical specifications of compute capability 9.0)."""


SMALL_SHARED_BYTES = 99 * 1024
"""The same of capability 8.9."""


def compiled_by(*arguments: str) -> dict[str, dict]:
    done = subprocess.run(
        [sys.executable, str(TESTS / "helpers" / "kernels_for_hopper.py"), *arguments],
        capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    return compiled_by()


def test_every_kernel_compiles(compiled: dict[str, dict]):
    """Sizes over 2^31, bf16 and fp32; nothing spills, and an H200 has the shared memory."""
    files = [path for room in ("kernels", "optim", "bench/kernels") for path in (SOURCE / room).rglob("*.py")]
    text = "".join(path.read_text() for path in files)
    written = set(re.findall(r"^def ([a-z]\w*_kernel)\(", text, re.MULTILINE))
    assert {name for report in compiled.values() for name in report["kernels"]} == written
    for name, report in compiled.items():
        assert report["kernels"], f"{name} compiled nothing of its own"
        assert report["spills"] == 0, name
        assert report["shared_bytes"] <= MOST_SHARED_BYTES, name


def test_grids_are_within_cudas_limits(compiled: dict[str, dict]):
    """The same table: 2^31 - 1 blocks along x, 65,535 along y and z."""
    for name, report in compiled.items():
        x, y, z = report["largest_grid"]
        assert x < 2**31, name
        assert max(y, z) < 2**16, name


def test_later_steps_compile_nothing(compiled: dict[str, dict]):
    """Seeds, rates and corrections change each step; Triton makes a new kernel for an integer of 1 or a
    multiple of 16."""
    assert {name: report["compiled_later"] for name, report in compiled.items()} == dict.fromkeys(compiled, 0)


def test_reads_are_not_taken_out_of_their_loop(compiled: dict[str, dict]):
    """Else what is timed as the bandwidth of a cache is that of registers. 8192 fp32 by 256 threads: 8 reads
    of 16 bytes."""
    for name, kind in (("through", r"LDG\.E\.128 "), ("past", r"LDG\.E\.128\.STRONG\.GPU ")):
        (body,) = loops(compiled[f"reads {name} L1"]["sass"])
        assert len(re.findall(kind, body)) == 8
        assert body.count("LDG") == 8
        assert body.count("FADD") == 32


def test_attention_fits_small_gpus():
    """Heads of 256 in bf16 and fp32 run where a program has 99 KB of shared memory."""
    report = compiled_by("small")
    assert [len(each["kernels"]) for each in report.values()] == [4, 4]
    for name, each in report.items():
        assert each["shared_bytes"] <= SMALL_SHARED_BYTES, name
