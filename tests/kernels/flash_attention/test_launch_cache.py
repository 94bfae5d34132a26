"""The second launch with equal shapes: nothing is chosen, bound or checked again, and nothing of the first is
reused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from trainfit.kernels.flash_attention import dispatch as choice

launches = pytest.importorskip("trainfit.kernels.flash_attention.hopper.launch_cache")
BF16 = torch.bfloat16


class Compiled:
    """As Triton's: launched by grid and all arguments."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.calls.append((grid, arguments))


class Kernel:
    """As Triton's: binds its arguments, compiles, launches, and gives the compiled kernel back."""

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


def launch(kernel: Kernel, x: torch.Tensor, y: torch.Tensor, scale: float = 0.5, block: int = 64) -> None:
    launches.launch(kernel, (7,), ((x, (1, 1, 16, 64)),), (y, scale, 3), {"BLOCK": block}, in_gluon=False)


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=BF16)


def test_an_equal_launch_takes_the_compiled_kernel_with_its_own_tensors(kernel: Kernel):
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


def test_what_triton_compiles_for_is_bound_again(kernel: Kernel, monkeypatch: pytest.MonkeyPatch):
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


def test_a_kernel_without_constants(kernel: Kernel):
    for _ in range(2):
        launches.launch(kernel, (7,), (), (empty(64), empty(64), 0.5, 3, 2), {})
    assert (len(kernel.bound), len(kernel.repeated)) == (1, 1)


def test_constants_in_another_order_are_seen(kernel: Kernel):
    with pytest.raises(AssertionError, match="BLOCK"):
        launches.launch(kernel, (7,), (), (empty(64), empty(64), 0.5), {"BLOCK": 2, "n": 3})


def test_known_launches_keep_no_tensor(kernel: Kernel):
    launch(kernel, empty(1, 2, 64, 64), empty(64))
    (known,) = launches._cache.values()
    assert not any(isinstance(x, torch.Tensor) for fields in known.fields for x in fields.values())


@pytest.fixture
def _nothing_chosen() -> Iterator[None]:
    """Clear cached choices before and after the test."""
    choice._chosen.cache_clear()
    yield
    choice._chosen.cache_clear()


@pytest.mark.usefixtures("_nothing_chosen")
def test_an_equal_call_chooses_nothing_again(monkeypatch: pytest.MonkeyPatch):
    checked = []
    monkeypatch.setattr(choice, "fits", lambda *each: checked.append(each) or True)
    machine = choice.Machine((9, 0))
    for rows in (136, 136, 144):
        x = empty(1, 2, rows, 128)
        forward = choice.forward_launch(x, x, x, True, 0.1, machine)
        backward = choice.backward_launch(x, x, x, x, x, x, True, 0.1, machine)
        assert (forward.how, backward.how) == (choice.FORWARD[128], choice.BACKWARD[128])
    assert len(checked) == 4
