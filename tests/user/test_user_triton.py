"""Triton kernels that user code launches under ``trainfit.trace``.

They are recorded, not launched, whether they were defined for a GPU or for the interpreter.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainfit
from trainfit.catalog.load import gpu
from trainfit.ledger.ledger import Ledger
from trainfit.user import user_gpu
from trainfit.user.triton_accesses import Access, accesses
from user_training import steps

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
N = 1 << 20
MIB = 1 << 20


@triton.jit
def _put(pointer, offsets, value):
    tl.store(pointer + offsets, value)


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _put(y, offsets, 2 * tl.load(x + offsets, mask=offsets < n))


def _add(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = x + offsets
    tl.store(row, tl.load(row) + tl.load(y + offsets))


add_ = triton.runtime.JITFunction(_add)  # As for a GPU, whether or not the interpreter is on


@triton.jit
def scale(x, y, n, BLOCK: tl.constexpr, IS_EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, 3 * tl.load(x + offsets))


CONFIGS = [triton.Config({"BLOCK": 512}, num_warps=8), triton.Config({"BLOCK": 1024})]
tuned = triton.autotune(configs=CONFIGS, key=["n"], reset_to_zero=["y"])(
    triton.heuristics({"IS_EVEN": lambda args: args["n"] % args["BLOCK"] == 0})(scale)
)


@torch.library.triton_op("trainfit_tests::sum_of", mutates_args={})
def sum_of(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    torch.empty(2 * MIB, dtype=torch.uint8, device=x.device)
    torch.library.wrap_triton(add_)[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](out, y, N, BLOCK=512)
    return out


@torch.library.custom_op("trainfit_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    double[(N // 512,)](x, y, N, BLOCK=512)
    return y


def inside(code: Callable[[], None], name: str = "h200") -> Ledger:
    """Return the ledger of some code on the virtual GPU."""
    with user_gpu(gpu(name), prefers_cudnn=False, max_steps=1) as virtual:
        code()
        return virtual.tracer.finish()


def launched(code: Any) -> list[tuple[str, int, str]]:
    """Return name, bytes and dtype of the kernels that some code launches on the virtual GPU."""
    return [(op.name, op.num_bytes, op.dtype) for op in inside(code).ops if op.name.startswith("triton.")]


def test_launch_moves_what_the_kernel_reads_and_writes() -> None:
    of_double, of_add = accesses(double.fn), accesses(add_.fn)
    assert (of_double["x"], of_double["y"]) == (Access(reads=True), Access(writes=True))
    assert (of_add["x"], of_add["y"]) == (Access(True, True), Access(reads=True))

    def code() -> None:
        x = torch.ones(N, device="cuda", dtype=torch.bfloat16)
        y = torch.empty_like(x)
        double[(triton.cdiv(N, 512),)](x, y, N, BLOCK=512, num_warps=8)
        add_.run(x, y, n=N, BLOCK=512, grid=lambda meta: (N // meta["BLOCK"],), warmup=False)
        double[(1,)](x, x, N, BLOCK=512)
        double[(0,)](x, y, N, BLOCK=512)

    expected = [("double", 4 * MIB), ("_add", 6 * MIB), ("double", 4 * MIB)]
    assert launched(code) == [(f"triton.{name}", num_bytes, "bfloat16") for name, num_bytes in expected]


def test_options_of_a_launch_are_those_of_the_vendor() -> None:
    def code() -> None:
        x = torch.ones(N, device="cuda")
        double[(1,)](x, x, N, BLOCK=512, waves_per_eu=2, matrix_instr_nonkdim=16, kpack=2)

    assert [op.name for op in inside(code, "mi300x").ops].count("triton.double") == 1
    with pytest.raises(KeyError, match="waves_per_eu|matrix_instr_nonkdim|kpack"):
        inside(code)


def test_autotuned_kernel_takes_its_first_configuration() -> None:
    grids = []

    def grid(meta: Any) -> tuple[int]:
        grids.append((meta["BLOCK"], meta["IS_EVEN"]))
        return (triton.cdiv(N, meta["BLOCK"]),)

    def code() -> None:
        x, y = torch.zeros(2, N, device="cuda")
        tuned[grid](x, y, N)
        tuned[grid](x, y, N)

    ledger = inside(code)
    assert [op.name for op in ledger.ops].count("triton.scale") == 2
    assert grids == [(512, True), (1024, True), (512, True), (512, True)]
    assert 256 * MIB in [storage.num_bytes for storage in ledger.storages]  # What a benchmark clears
    assert not tuned.cache


def test_kernels_of_operators() -> None:
    """The Python code of a ``triton_op``, and of an operator without a fake implementation, is traced."""

    def code() -> None:
        x = torch.ones(N, device="cuda")
        assert sum_of(doubled(x), x).shape == x.shape

    ledger = inside(code)
    assert [op.name for op in ledger.ops if op.name.startswith("triton.")] == ["triton.double", "triton._add"]
    assert [s.num_bytes // MIB for s in ledger.storages if s.num_bytes >= MIB] == [4, 4, 4, 2]


def test_what_a_kernel_writes_is_not_known() -> None:
    def code() -> None:
        x, y = (torch.ones(4, device="cuda") for _ in "xy")
        assert y.sum().item() == 4
        double[(1,)](x, y, 4, BLOCK=4)
        assert x.sum().item() == 4
        assert y.sum().item() == 0

    inside(code)


def test_launch_on_the_host_or_with_an_unknown_option_is_an_error() -> None:
    def code() -> None:
        x, host = torch.ones(4, device="cuda"), torch.ones(4)
        with pytest.raises(ValueError, match="Pointer argument .at 1. cannot be accessed"):
            double[(1,)](x, host, 4, BLOCK=4)
        with pytest.raises(KeyError, match="num_warp was specified but unrecognised"):
            double[(1,)](x, x, 4, BLOCK=4, num_warp=8)
        with pytest.raises(TypeError, match="missing a required argument: 'n'"):
            double[(1,)](x, x, BLOCK=4)

    inside(code)


def test_step_with_a_kernel_of_its_own() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return doubled(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return doubled(gradients[0])

    class Apply(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Doubled.apply(x)

    def train() -> None:
        model = nn.Linear(1024, 1024, device="cuda")
        doubling = nn.Sequential(model, Apply())
        steps(doubling, torch.optim.SGD(model.parameters(), lr=0.1), width=1024)

    estimate = trainfit.trace(train, gpu="h200", steps=2)
    assert estimate.fits
    assert any("Triton kernels of the script (double)" in line for line in estimate.assumptions)
