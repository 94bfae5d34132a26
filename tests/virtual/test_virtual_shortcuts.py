"""The virtual GPU's shorter ways give what the long ones give."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trainfit.virtual.cuda import fake_impls as fake_run
from trainfit.virtual.trace.process_state import frozen_gc

aten = torch.ops.aten
CASES: dict[str, Callable[[], tuple]] = {
    "mm": lambda: (aten.mm.default, (_fake(4, 6), _fake(8, 6).t())),
    "mul, broadcast and promoted": lambda: (
        aten.mul.Tensor,
        (_fake(3, 1, 5), _fake(4, 1, dtype=torch.bfloat16)),
    ),
    "mul, by a number": lambda: (aten.mul.Tensor, (_fake(3, dtype=torch.bfloat16), 2.0)),
    "add, transposed": lambda: (aten.add.Tensor, (_fake(4, 6).t(), _fake(6, 4))),
    "sub": lambda: (aten.sub.Tensor, (_fake(4, 6), _fake(6))),
    "neg": lambda: (aten.neg.default, (_fake(4, 6).t(),)),
    "pow": lambda: (aten.pow.Tensor_Scalar, (_fake(4, dtype=torch.int64), 0.5)),
    "sum": lambda: (aten.sum.dim_IntList, (_fake(4, 6, dtype=torch.int32), [0], True)),
    "detach": lambda: (aten.detach.default, (_fake(4, 6),)),
    "t": lambda: (aten.t.default, (_fake(4, 6),)),
    "view": lambda: (aten.view.default, (_fake(4, 6), [2, -1])),
    "unsafe view": lambda: (aten._unsafe_view.default, (_fake(4, 6), [24])),
    "transpose": lambda: (aten.transpose.int, (_fake(4, 6, 2), 0, -1)),
    "slice": lambda: (aten.slice.Tensor, (_fake(4, 6), 1, 2, 9223372036854775807)),
    "unsqueeze": lambda: (aten.unsqueeze.default, (_fake(4, 6), 1)),
    "expand": lambda: (aten.expand.default, (_fake(4, 1), [3, 4, 5])),
    "as strided": lambda: (aten.as_strided.default, (_fake(4, 6), [2, 3], [1, 2], 4)),
    "empty": lambda: (
        aten.empty.memory_format,
        ([2, 3, 4, 5],),
        {"device": torch.device("cpu"), "memory_format": torch.channels_last},
    ),
    "ones": lambda: (
        aten.ones.default,
        ([7],),
        {"device": torch.device("cpu"), "dtype": torch.float16, "pin_memory": False},
    ),
    "zeros": lambda: (aten.zeros.default, ([],), {"device": torch.device("cpu")}),
}


def _fake(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("name", CASES)
def test_by_its_meta_kernel_an_operation_gives_what_fake_tensor_mode_gives(name: str) -> None:
    with FakeTensorMode():
        func, args, *kwargs = CASES[name]()
        keywords = kwargs[0] if kwargs else {}
        assert func in fake_run.PLAIN | fake_run.FACTORIES
        short = fake_run._by_meta_kernel(func, args, keywords)
        long = func(*args, **keywords)
        assert isinstance(short, FakeTensor)
        assert short is not args[0]
        for notes in ("shape", "dtype", "device", "layout"):
            assert getattr(short, notes) == getattr(long, notes), notes
        assert short.stride() == long.stride()
        assert short.storage_offset() == long.storage_offset()
        assert short.untyped_storage().nbytes() == long.untyped_storage().nbytes()
        of = args[0].untyped_storage()._cdata if isinstance(args[0], Tensor) else None
        assert (short.untyped_storage()._cdata == of) == (long.untyped_storage()._cdata == of)


def test_every_shortened_operation_is_compared() -> None:
    with FakeTensorMode():
        assert {case()[0] for case in CASES.values()} == fake_run.PLAIN | fake_run.FACTORIES


def test_with_a_real_tensor_fake_tensor_mode_decides() -> None:
    real = torch.tensor(2.0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert fake_run._by_meta_kernel(aten.mul.Tensor, (_fake(3), real), {}) is None


class _Knot:
    """Holds itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_what_was_there_is_set_aside_and_new_cycles_are_still_found() -> None:
    num_before = len(gc.get_objects())
    with frozen_gc(), frozen_gc():
        assert gc.get_freeze_count() > 0.9 * num_before
        assert len(gc.get_objects()) < 0.1 * num_before
        knot = weakref.ref(_Knot())
        gc.collect()
        assert knot() is None
    assert gc.get_freeze_count() == 0
    assert len(gc.get_objects()) > 0.9 * num_before


def test_what_the_caller_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with frozen_gc():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
