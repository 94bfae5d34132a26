"""Launches of attention: choice of kernels, cache of launches, persistent schedule, order of dQ."""

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernel_runs import interpreted
from trainfit.kernels.determinism import deterministic_kernels
from trainfit.kernels.flash_attention import dispatch, reference
from trainfit.kernels.flash_attention.cudnn_launch import cudnn_backward
from trainfit.kernels.flash_attention.dispatch import Machine, backward_groups, forward_groups
from trainfit.kernels.flash_attention.hopper import launch as hopper
from trainfit.kernels.flash_attention.hopper.schedule import lengths, shares, shift_of
from trainfit.kernels.flash_attention.triton_launch import backward_in_passes, triton_backward, triton_forward

launches = pytest.importorskip("trainfit.kernels.flash_attention.hopper.launch_cache")
BF16, FP16 = torch.bfloat16, torch.float16

# -- which kernels


def heads(d: int, dtype: torch.dtype, layout: str = "bshd") -> Tensor:
    with FakeTensorMode():
        if layout == "bshd":
            return torch.empty(2, 33, 4, d, dtype=dtype).transpose(1, 2)
        whole = torch.empty(2, 33, 12 * d + (2 if layout == "odd" else 0), dtype=dtype)
        part = whole[:, :, 2 if layout == "shifted" else 0 :][:, :, : 4 * d]
        return part.unflatten(2, (4, d)).transpose(1, 2)


def choice(
    x: Tensor, machine: Machine, gradient: Tensor | None = None, scale: float = 0.1
) -> tuple[Any, ...]:
    """Return launcher and configuration of forward and backward."""
    forward = dispatch.forward_launch(x, x, x, True, scale, machine)
    gradient = x if gradient is None else gradient
    backward = dispatch.backward_launch(gradient, x, x, x, x, x, True, scale, machine)
    return forward.function, forward.how, backward.function, backward.how


HOPPER = Machine((9, 0))
PLAIN = (triton_forward, None, triton_backward, None)
TILED = (reference.tiled_forward, None, reference.tiled_backward, None)
GLUON = {
    d: (hopper.gluon_forward, forward_groups(d, 33, 1), hopper.backward, backward_groups(d, 33, 1))
    for d in (64, 128)
}
BY_CUDNN = (hopper.gluon_forward, forward_groups(256, 33, 1), cudnn_backward, None)
WIDE = (hopper.gluon_forward, forward_groups(256, 33, 1), backward_in_passes, dispatch.IN_PASSES[256])
WIDEST = (triton_forward, None, backward_in_passes, dispatch.IN_PASSES[512])
CHOICES = {
    "d 128": (128, BF16, "bshd", HOPPER, GLUON[128]),
    "d 64": (64, FP16, "bshd", HOPPER, GLUON[64]),
    "part of qkv": (64, BF16, "qkv", HOPPER, GLUON[64]),
    "no Gluon": (128, BF16, "bshd", Machine((9, 0), has_gluon=False), PLAIN),
    "fp32": (128, torch.float32, "bshd", HOPPER, PLAIN),
    "d 80": (80, BF16, "bshd", HOPPER, PLAIN),
    "d 256": (256, BF16, "bshd", HOPPER, BY_CUDNN),
    "d 256 without cuDNN": (256, BF16, "bshd", Machine((9, 0), has_cudnn=False), WIDE),
    "d 320": (320, BF16, "bshd", HOPPER, WIDEST),
    "d 320 without TMA": (320, BF16, "odd", HOPPER, PLAIN),
    "rows not on 16 bytes": (64, BF16, "odd", HOPPER, PLAIN),
    "starts between 16 bytes": (64, BF16, "shifted", HOPPER, PLAIN),
    "Blackwell": (128, BF16, "bshd", Machine((10, 0)), PLAIN),
    "fp64": (
        64,
        torch.float64,
        "bshd",
        HOPPER,
        (reference.tiled_forward, None, reference.tiled_backward, None),
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choice(name: str) -> None:
    d, dtype, layout, machine, expected = CHOICES[name]
    assert choice(heads(d, dtype, layout), machine) == expected


def test_choice_by_determinism_scale_and_stride_0() -> None:
    """Determinism and an expanded gradient change the backward alone."""
    x = heads(128, BF16)
    backward_alone = (*GLUON[128][:2], triton_backward, None)
    with deterministic_kernels():
        assert choice(x, HOPPER) == backward_alone
    with FakeTensorMode():
        one = torch.empty((), dtype=BF16).expand_as(x)
    assert choice(x, HOPPER, gradient=one) == backward_alone
    assert choice(x, HOPPER, scale=-0.1) == PLAIN
    shared = x[:, :1].expand_as(x)
    assert dispatch.forward_launch(x, shared, x, True, 0.1, HOPPER).function is triton_forward
    assert dispatch.forward_launch(x, x, shared, True, 0.1, HOPPER).function is triton_forward


def test_cudnns_backward_is_left_out_where_it_masks_or_adds_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def backward(n: int, m: int, is_causal: bool) -> Any:
        with FakeTensorMode():
            q, k = (torch.empty(2, rows, 4, 256, dtype=BF16).transpose(1, 2) for rows in (n, m))
        return dispatch.backward_launch(q, q, k, k, q, q, is_causal, 0.1, HOPPER).kernel

    shapes = [(40, 40, True), (40, 50, False), (40, 50, True), (40, 1, False)]
    assert [backward(*each) for each in shapes] == ["cudnn", "cudnn", "passes", "passes"]
    with deterministic_kernels():
        assert backward(40, 40, True) == "passes"
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert backward(40, 40, True) == "passes"


def test_choice_by_length_and_groups() -> None:
    """Short sequences of heads of 64 in tiles of 128 rows; grouped heads with more heads at once."""
    groups = {
        (d, n, group): forward_groups(d, n, group)
        for d in (64, 128, 256)
        for n in (1024, 8192)
        for group in (1, 4)
    }
    assert {how.persistent for (d, n, _), how in groups.items() if d == 128 or (d, n) == (64, 1024)} == {True}
    assert not any(how.persistent for (d, n, _), how in groups.items() if d == 256 or (d, n) == (64, 8192))
    assert {groups[128, n, 4].heads_at_once for n in (1024, 8192)} == {16}
    assert {how.heads_at_once for (_, _, group), how in groups.items() if group == 1} == {8}
    backwards = [backward_groups(128, n, group).heads_at_once for n in (2048, 16384) for group in (1, 4)]
    assert backwards == [4, 8, 4, 2]
    with FakeTensorMode():
        q, k = (torch.empty(2, 5000, heads, 64, dtype=BF16).transpose(1, 2) for heads in (8, 2))
    assert dispatch.forward_launch(q, k, k, True, 0.1, HOPPER).how == forward_groups(64, 5000, 4)
    backward = dispatch.backward_launch(q, q, k, k, q, q, True, 0.1, HOPPER)
    assert backward.how == backward_groups(64, 5000, 4)


@pytest.fixture
def _nothing_chosen() -> Iterator[None]:
    """Clear cached choices before and after the test."""
    dispatch._chosen.cache_clear()
    yield
    dispatch._chosen.cache_clear()


@pytest.mark.usefixtures("_nothing_chosen")
def test_an_equal_call_chooses_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(dispatch, "fits", lambda *each: checked.append(each) or True)
    for rows in (136, 136, 144):
        assert choice(empty(1, 2, rows, 128), HOPPER)[1] == GLUON[128][1]
    assert len(checked) == 4


# -- the cache of launches


class Compiled:
    """As Triton's: launched by grid and all arguments."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.calls.append((grid, arguments))


class Kernel:
    """As Triton's: binds its arguments, compiles, launches, and returns the compiled kernel."""

    def __init__(self) -> None:
        self.arg_names = ["X", "Y", "scale", "n", "BLOCK"]
        self.fn, self.bound, self.repeated = object(), [], []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def bind(*arguments: Any, **constants: Any) -> Compiled:
            self.bound.append((grid, arguments, constants))
            return Compiled(self.repeated)

        return bind


class Driver:
    device = 0

    def get_current_device(self) -> int:
        return self.device


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launches, "JITFunction", Kernel)
    monkeypatch.setattr(launches, "CompiledKernel", Compiled)
    monkeypatch.setattr(launches, "driver", type("Drivers", (), {"active": Driver()}))
    monkeypatch.setattr(launches, "_cache", {})
    return Kernel()


def launch(kernel: Kernel, x: Tensor, y: Tensor, scale: float = 0.5, block: int = 64) -> None:
    launches.launch(kernel, (7,), ((x, (1, 1, 16, 64)),), (y, scale, 3), {"BLOCK": block}, in_gluon=False)


def empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16)


def test_an_equal_launch_takes_the_compiled_kernel_with_its_own_tensors(kernel: Kernel) -> None:
    x, y, new_x, new_y = empty(1, 2, 64, 64), empty(64), empty(1, 2, 64, 64), empty(64)
    launch(kernel, x, y)
    launch(kernel, new_x, new_y, scale=0.25)
    assert len(kernel.bound) == 1
    (grid, (descriptor, *values)), *others = kernel.repeated
    first = kernel.bound[0][1][0]
    assert (others, grid) == ([], (7, 1, 1))
    assert descriptor.base is new_x
    assert values[0] is new_y
    assert values[1:] == [0.25, 3, 64]
    assert type(descriptor) is type(first)
    assert first.base is x
    assert {**vars(descriptor), "base": 0} == {**vars(first), "base": 0}
    (known,) = launches._cache.values()
    assert not any(isinstance(x, Tensor) for fields in known.fields for x in fields.values())


def test_what_triton_compiles_for_is_bound_again(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = empty(1, 2, 64, 64), empty(64)
    launch(kernel, x, y)
    shifted = empty(65)[1:]
    assert (shifted.data_ptr() - y.data_ptr()) % 16
    launch(kernel, x, shifted)
    launch(kernel, empty(1, 2, 72, 64), y)
    launch(kernel, empty(1, 64, 2, 64).transpose(1, 2), y)
    launch(kernel, x, y.half())
    launch(kernel, x, y, block=32)
    monkeypatch.setattr(Driver, "device", 1)
    launch(kernel, x, y)
    assert (len(kernel.bound), kernel.repeated) == (7, [])


def test_constants_in_another_order_are_refused(kernel: Kernel) -> None:
    with pytest.raises(AssertionError, match="BLOCK"):
        launches.launch(kernel, (7,), (), (empty(64), empty(64), 0.5), {"BLOCK": 2, "n": 3})


# -- the persistent schedule

H200 = 132  # Multiprocessors


def first_free(costs: list[int], programs: int) -> int:
    """When the last program ends if each tile goes to the program that is free first (Graham 1969)."""
    free = [(0, program) for program in range(programs)]
    for cost in costs:
        until, program = heappop(free)
        heappush(free, (until + cost, program))
    return max(free)[0]


@pytest.mark.parametrize(
    ("n", "heads", "most"),
    [(8192, 16, 1.001), (16384, 16, 1.003), (4096, 32, 1.003), (2048, 64, 1.04), (32768, 8, 1.03),
     (8192, 128, 1.01), (1000, 20, None), (1024, 128, None), (777, 40, None), (512, 200, None)],
)  # fmt: skip
def test_programs_do_nearly_the_same(n: int, heads: int, most: float | None) -> None:
    """Few tiles take at most a fifth longer than when each program takes the next one."""
    costs = lengths(n, n, heads, 128, 128, 8)
    bound = 1.2 * first_free(sorted(costs, reverse=True), H200) if most is None else most * sum(costs) / H200
    assert max(shares(costs, shift_of(n, n, heads, 128, 128, 8, H200), H200)) <= bound


@pytest.mark.parametrize(("n", "m", "heads"), [(300, 300, 5), (200, 520, 9), (520, 200, 16)])
def test_each_tile_is_taken_once(n: int, m: int, heads: int) -> None:
    found = lengths(n, m, heads, 128, 128, 4)
    wanted = []
    for first in range(0, n, 128):
        seen = max(0, min(m, first + 128 + m - n))
        wanted += [max(1, -(-seen // 128)) + 1] * heads
    assert sorted(found) == sorted(wanted)
    assert all(sum(shares(found, shift, 7)) == sum(wanted) for shift in range(7))


# -- the order of dQ


def in_thread_order(half: Tensor) -> Tensor:
    """[64, 64] -> [4096]: four registers of all 128 threads follow one another.

    Register r of a thread: row 16 warp + lane / 4 + 8 (r / 2 % 2), column 8 (r / 4) + 2 (lane % 4) + r % 2
    (PTX manual, wgmma's accumulator D).
    """
    r, thread = torch.arange(32).view(8, 1, 4), torch.arange(128).view(1, 128, 1)
    lane = thread % 32
    rows = 16 * (thread // 32) + lane // 4 + 8 * (r // 2 % 2)
    return half[rows, 8 * (r // 4) + 2 * (lane % 4) + r % 2].flatten()


@interpreted
@pytest.mark.parametrize(("n", "d"), [(200, 128), (300, 64), (130, 96)])
def test_sums_of_dq_are_scaled_and_put_in_order(n: int, d: int) -> None:
    columns, b, h = hopper.block_d(d), 2, 3
    rows = 8192 // columns  # of a tile of dQ, which two groups share
    sums = torch.randn(b, h, -(-n // hopper.ROWS) * hopper.ROWS, columns)
    halves = [half for head in sums.flatten(0, 1) for tile in head.split(rows) for half in tile.split(64, 1)]
    halves = [part for half in halves for part in half.split(64)]
    like = torch.empty(b, n, h, d, dtype=FP16).transpose(1, 2)
    mixed = torch.cat([in_thread_order(half) for half in halves]).view_as(sums)
    found = hopper.scaled(mixed, like, 0.5)
    assert found.stride() == like.stride()
    assert torch.equal(found, (sums[:, :, :n, :d] * 0.5).half())
