"""Every Triton kernel of ours compiles for an H200, from the very arguments that its launcher gives it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_runs import loops
from machine_bytes import stored_in_shared

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src/trainfit"
SHARED_BYTES = {"H200": 227 * 1024, "small": 99 * 1024}
"""Most of one block of threads (CUDA programming guide, compute capabilities 9.0 and 8.9)."""


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    command = [sys.executable, str(TESTS / "kernels" / "kernels_for_hopper.py")]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_kernel_compiles(compiled: dict[str, dict]):
    """Sizes over 2^31, bf16 and fp32; nothing spills, and the GPU has the shared memory."""
    files = [path for room in ("kernels", "optim", "bench/kernels") for path in (SOURCE / room).rglob("*.py")]
    text = "".join(path.read_text() for path in files)
    written = set(re.findall(r"^def ([a-z]\w*_kernel)\(", text, re.MULTILINE))
    assert {name for report in compiled.values() for name in report["kernels"]} == written
    for name, report in compiled.items():
        is_small = name.startswith("small")
        assert len(report["kernels"]) == 4 if is_small else report["kernels"], name
        assert is_small or not any(each["spills"] for each in report["ptx"].values()), name
        assert report["shared_bytes"] <= SHARED_BYTES["small" if is_small else "H200"], name


def test_attention_in_fp32_writes_its_results_on_blackwell(compiled: dict[str, dict]):
    reports = {name: report for name, report in compiled.items() if name.startswith("Blackwell")}
    assert len(reports) == 2
    assert all(each["writes"] for report in reports.values() for each in report["ptx"].values())


def test_quantised_weights_move_in_16_bytes_and_nothing_is_fused(compiled: dict[str, dict]):
    reports = {name: compiled[f"{name} bf16"]["ptx"] for name in ("nf4", "int8", "fp8")}
    assert not any(each["fused"] for report in reports.values() for each in report.values())
    accesses = {
        name: [(each["loads"], each["stores"]) for kernel, each in report.items() if "dequantize" in kernel]
        for name, report in reports.items()
    }
    assert accesses == {"nf4": [(1, 4)], "int8": [(1, 2)], "fp8": [(1, 2)]}


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
        (code,) = compiled[f"reads {name} L1"]["sass"].values()
        (body,) = loops(code)
        assert len(re.findall(kind, body)) == 8
        assert body.count("LDG") == 8
        assert body.count("FADD") == 32


@pytest.mark.parametrize("sizes", ["large", "odd"])
@pytest.mark.parametrize("scales", ["", " by earlier scales"])
def test_each_byte_that_is_transposed_was_converted_before(
    compiled: dict[str, dict], scales: str, sizes: str
):
    """ptxas 12.8 and 12.9 read a byte before its conversion where nothing stands between them."""
    codes = compiled[f"gates in fp8{scales}, {sizes}"]["sass"]
    stored = list(stored_in_shared(codes["swiglu_backward_fp8_kernel"]))
    if scales:  # Warps exchange the largest magnitudes too, fp32.
        stored = [one for one in stored if one != [None] * 4]
    found = [byte for one in stored for byte in one]
    assert set(map(type, found)) == {tuple}
    assert len(set(found)) == 96  # Of a thread: 32 elements of each gradient, and of the forward's output


@pytest.mark.parametrize("sizes", ["large", "odd"])
def test_of_norms_too(compiled: dict[str, dict], sizes: str):
    """Besides codes the weight goes through shared memory."""
    code = compiled[f"layouts in fp8 apart, {sizes}"]["sass"]["rms_norm_fp8_transposed_kernel"]
    found = [byte for one in stored_in_shared(code) if one != [None] * len(one) for byte in one]
    assert set(map(type, found)) == {tuple}
    assert len(set(found)) == 64
