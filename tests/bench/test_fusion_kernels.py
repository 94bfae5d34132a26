"""Kernels that experiments time against their definitions, in the interpreter; CUDA C++ as nvcc makes it."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bench_rows import CPU, tiny_bench
from kernel_runs import interpreted, interpreted_loops, loops
from trainfit.bench.experiments import fusion
from trainfit.bench.kernels import normed_swiglu, nvcc, repeated_reads
from trainfit.bench.kernels.repeated_reads import BLOCK, Reads
from trainfit.bench.workloads import memory_levels as levels
from trainfit.spec.errors import InputError

TRITON = pytest.importorskip("triton")
CUOBJDUMP = Path(TRITON.__file__).parent / "backends/nvidia/bin/cuobjdump"


def inputs(n: int, f: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(n * f)
    return fusion.inputs(n, 2 * f, dtype, CPU)


def test_the_chain_is_its_definition() -> None:
    x, weight, _ = inputs(5, 7, torch.float64)
    rows, w = x.numpy(), weight.numpy()
    h = rows * w / np.sqrt((rows**2).mean(1, keepdims=True) + normed_swiglu.EPS)
    expected = h[:, :7] / (1 + np.exp(-h[:, :7])) * h[:, 7:]
    for chain in (normed_swiglu.plain, normed_swiglu.with_pytorchs_norm):
        np.testing.assert_allclose(chain(x, weight).numpy(), expected, rtol=1e-12)


@interpreted
@pytest.mark.parametrize(
    ("n", "f", "dtype"), [(5, 1, torch.float32), (5, 16, torch.float16), (7, 131, torch.float32)]
)
def test_the_triton_chain_passes_the_experiments_own_check(n: int, f: int, dtype: torch.dtype) -> None:
    x, weight, y = inputs(n, f, dtype)
    error = fusion.checked(normed_swiglu.triton_into, x, weight, y)["relative_error"]
    assert 0 <= float(error) <= {torch.float32: 1e-6, torch.float16: 1e-3}[dtype]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, weight, into: into,  # nothing is written: NaN stays
        lambda x, weight, into: 1.01 * normed_swiglu.plain(x, weight),
        lambda x, weight, into: normed_swiglu.plain(x, weight).double(),
    ],
)
def test_a_wrong_chain_is_not_timed(wrong: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ArithmeticError, match="against fp64"):
        fusion.checked(wrong, *inputs(8, 16))


def test_a_kernel_refuses_sizes_and_dtypes_that_it_does_not_take() -> None:
    x, weight, y = inputs(4, 8)
    with pytest.raises(InputError, match=r"\[n, 2f\]"):
        normed_swiglu.triton_into(x, weight[:8], y)
    with pytest.raises(InputError, match="contiguous"):
        normed_swiglu.triton_into(x.t().contiguous().t(), weight, y)
    point = {"rows": 8, "row size": 32, "body": "CUDA C++"}
    (row,) = fusion._row(tiny_bench(), point, torch.float32, 1.0)
    assert (row.status, row.times, row.numbers) == ("refused", None, {})
    assert "bf16" in row.message


def test_moved_bytes_are_those_of_the_operations() -> None:
    a, b = torch.ones(1000), torch.ones(1000)
    assert fusion.moved_bytes(lambda: a + b) == 3 * 4000
    assert fusion.moved_bytes(lambda: a.view(10, 100).t()) == 0
    assert fusion.moved_bytes(lambda: (a + b).view(10, 100).sum()) == 3 * 4000 + 4000 + 4
    assert fusion.launches(lambda: a + b, CPU) is None


def test_a_compiled_chain_of_one_kernel_moves_its_tensors(
    fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor counts the bytes as it writes its C++, which is not compiled here."""
    from torch._inductor.async_compile import AsyncCompile

    written: list[str] = []

    def load(self: object, argtypes: object, source: str) -> Callable[..., None]:
        written.append(source)
        return lambda *tensors: None

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", load)
    # Otherwise Inductor compiles a program for each instruction set.
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)
    x, y = torch.ones(1000), torch.ones(1000)
    compiled = torch.compile(lambda x, y: torch.relu(x + y) * y, dynamic=False)
    assert fusion.compiled_bytes(lambda: compiled(x, y)) == 3 * 4000
    assert len(written) == 1
    with pytest.raises(RuntimeError, match="compiled anew"):
        fusion.compiled_bytes(lambda: compiled(x, y))


def test_the_least_bytes_of_the_chain_are_its_tensors() -> None:
    x, weight, y = inputs(6, 8, torch.bfloat16)
    assert fusion.least_bytes(6, 16, torch.bfloat16) == sum(tensor.nbytes for tensor in (x, weight, y))
    least, run = fusion.least_bytes(6, 16, torch.bfloat16), lambda: normed_swiglu.plain(x, weight)
    assert int(fusion.counted("eager", run, least, CPU)["moved_bytes"]) > 2 * least
    assert fusion.counted("Triton", run, least, CPU)["moved_bytes"] == least


@interpreted_loops
@pytest.mark.parametrize("past_l1", [False, True])
def test_a_reading_kernel_reads_the_blocks_of_its_pattern(past_l1: bool) -> None:
    for how in (Reads(8, 4, 4, 2), Reads(5, 7, 1, 3), Reads(2, 3, 1, 5)):
        x = torch.rand(how.num_blocks * BLOCK)
        sums = repeated_reads.triton_sums(x, how, past_l1=past_l1)
        levels.agree(sums, repeated_reads.plain(x, how))
    with pytest.raises(ArithmeticError, match="sums"):
        levels.agree(sums, 1.01 * sums)


def test_device_memory_is_read_once() -> None:
    """The same step as ``levels.rows`` gives: a quarter as many programs as blocks, four turns."""
    how = Reads(40, 10, 10, 4)
    x = torch.zeros(how.num_blocks, BLOCK, dtype=torch.float64)
    x[:, 0] = 2.0 ** torch.arange(40)  # each block is a bit of the sum of all
    assert repeated_reads.plain(x.view(-1), how).sum().item() == 2.0**40 - 1
    assert how.num_bytes == x.float().nbytes


L2_BLOCKS, PROGRAMS, MULTIPROCESSORS = 62_914_560 // (32 * 1024), 264, 132  # Of an H200


@pytest.mark.parametrize("share", levels.L2_SHARES)
def test_programs_read_every_block_of_l2_and_none_soon_after_each_other(share: int) -> None:
    blocks = L2_BLOCKS // share
    step = levels.stride(blocks, PROGRAMS)
    assert len({turn * step % blocks for turn in range(blocks)}) == blocks  # Each program reads all.
    for apart in (MULTIPROCESSORS, *range(1, 8)):
        assert all((apart + turn * step) % blocks for turn in range(-8, 9)), apart
    if share == 2:  # A set of more blocks than programs is read again as late as possible.
        turns = [{(p + turn * step) % blocks for p in range(PROGRAMS)} for turn in range(3)]
        assert len(set.union(*turns)) == 3 * PROGRAMS


@pytest.fixture(scope="module")
def sass(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function that compiles a source of ``kernels/cuda`` for an H200, as machine code."""
    try:
        nvcc.nvcc()
    except InputError as error:
        pytest.skip(str(error))

    def of(name: str) -> str:
        file = tmp_path_factory.mktemp("cuda") / f"{name}.cubin"
        nvcc.compiled(name, (9, 0), file, "-cubin")
        return subprocess.run([CUOBJDUMP, "-sass", file], capture_output=True, text=True, check=True).stdout

    return of


def test_the_cuda_chain_reads_and_writes_16_bytes_at_a_time_and_spills_nothing(
    sass: Callable[[str], str],
) -> None:
    text = sass("normed_swiglu")
    moves = re.findall(r"\b(?:LDG|STG|LDL|STL)\S*", text)
    assert len(moves) > 10
    assert {move for move in moves if ".128" not in move} == set()
    assert not any(move.startswith(("LDL", "STL")) for move in moves)


def test_shared_memory_is_read_in_the_loop(sass: Callable[[str], str]) -> None:
    assert [body.count("LDS.128") for body in loops(sass("shared_reads"))] == [4]


def test_a_source_that_does_not_compile_says_why(
    sass: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong.cu").write_text("int one() { return undefined_name; }\n")
    monkeypatch.setattr(nvcc, "SOURCES", tmp_path)
    with pytest.raises(RuntimeError, match="undefined_name"):
        nvcc.compiled("wrong", (9, 0), tmp_path / "wrong.cubin", "-cubin")


def test_without_nvcc_it_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcc.shutil, "which", lambda name, path: None)
    with pytest.raises(InputError, match="CUDA_HOME"):
        nvcc.nvcc()


@pytest.mark.gpu
@pytest.mark.parametrize("f", [8, 4096, 8192])
def test_kernels_for_real(f: int) -> None:
    x, weight, y = fusion.inputs(1000, 2 * f, torch.bfloat16, torch.device("cuda"))
    for chain in (normed_swiglu.triton_into, normed_swiglu.cuda_into):
        fusion.checked(chain, x, weight, y.fill_(float("nan")))
    floats = torch.rand(repeated_reads.SHARED_FLOATS, device="cuda")
    levels.agree(repeated_reads.shared_sums(floats, 3, 5), repeated_reads.plain_shared(floats, 3, 5))
