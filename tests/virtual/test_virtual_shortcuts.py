"""Shortcuts of the virtual GPU (meta kernels, a frozen garbage collector) and its process-wide patches."""

import gc
import logging
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import flop_counter
from transformers import masking_utils

from trainfit.kernels.cross_entropy import gradients_in_forward
from trainfit.kernels.rms_norm import op as rms_norm_op
from trainfit.kernels.swiglu import op as swiglu_op
from trainfit.models.hf_attention import no_packed_sequences
from trainfit.techniques.recompute.budget import grouped_heads_counted
from trainfit.virtual.cuda import fake_impls as fake_run
from trainfit.virtual.quiet_imports import LOGGERS, quiet_imports
from trainfit.virtual.trace import process_state
from trainfit.virtual.trace.process_state import frozen_gc
from trainfit.virtual.trace.tensors import tensors_of

aten = torch.ops.aten
CPU = torch.device("cpu")
Case = tuple[Any, tuple[Any, ...], dict[str, Any]]


def cases() -> list[Case]:
    """Return calls of every shortened operation, on fake tensors."""
    matrix, tall, half = _fake(4, 6), _fake(4, 1), _fake(3, dtype=torch.bfloat16)
    calls: list[tuple[Any, ...]] = [
        (aten.mm.default, matrix, _fake(8, 6).t()), (aten.mul.Tensor, _fake(3, 1, 5), tall.bfloat16()),
        (aten.mul.Tensor, half, 2.0), (aten.add.Tensor, matrix.t(), _fake(6, 4)),
        (aten.sub.Tensor, matrix, _fake(6)), (aten.neg.default, matrix.t()),
        (aten.pow.Tensor_Scalar, _fake(4, dtype=torch.int64), 0.5),
        (aten.sum.dim_IntList, _fake(4, 6, dtype=torch.int32), [0], True), (aten.detach.default, matrix),
        (aten.t.default, matrix), (aten.view.default, matrix, [2, -1]),
        (aten._unsafe_view.default, matrix, [24]),
        (aten.transpose.int, _fake(4, 6, 2), 0, -1), (aten.slice.Tensor, matrix, 1, 2, 9223372036854775807),
        (aten.unsqueeze.default, matrix, 1), (aten.expand.default, tall, [3, 4, 5]),
        (aten.as_strided.default, matrix, [2, 3], [1, 2], 4),
    ]  # fmt: skip
    factories: list[Case] = [
        (aten.empty.memory_format, ([2, 3, 4, 5],), {"memory_format": torch.channels_last}),
        (aten.empty_strided.default, ([2, 3], [1, 4]), {"dtype": torch.bfloat16}),
        (aten.ones.default, ([7],), {"dtype": torch.float16, "pin_memory": False}),
        (aten.zeros.default, ([],), {}),
    ]
    found: list[Case] = [(func, tuple(args), {}) for func, *args in calls]
    return found + [(func, args, {"device": CPU, **kwargs}) for func, args, kwargs in factories]


def _fake(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def test_an_operations_meta_kernel_gives_what_fake_tensor_mode_gives() -> None:
    with FakeTensorMode():
        for func, args, kwargs in cases():
            short, long = fake_run._by_meta_kernel(func, args, kwargs), func(*args, **kwargs)
            assert isinstance(short, FakeTensor)
            assert short is not args[0]
            for read in (
                Tensor.size,
                Tensor.stride,
                Tensor.storage_offset,
                lambda t: (t.dtype, t.device, t.layout),
            ):
                assert read(short) == read(long), func
            assert short.untyped_storage().nbytes() == long.untyped_storage().nbytes()
            of = args[0].untyped_storage()._cdata if isinstance(args[0], Tensor) else None
            assert (short.untyped_storage()._cdata == of) == (long.untyped_storage()._cdata == of)
            assert vars(short) == vars(long), func
            assert torch._C._dispatch_keys(short) == torch._C._dispatch_keys(long), func
        assert {func for func, *_ in cases()} == fake_run.PLAIN | fake_run.FACTORIES


def drawn(chance: random.Random, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of a random layout: dimensions permuted, sliced, expanded, or none of these."""
    sizes = [2 * size if chance.random() < 0.2 else size for size in shape]
    order = chance.sample(range(len(shape)), len(shape)) if chance.random() < 0.5 else [*range(len(shape))]
    made = torch.ones([sizes[dim] for dim in order], dtype=dtype)
    made = made.permute([order.index(dim) for dim in range(len(shape))])
    for dim, size in enumerate(shape):
        made = made.narrow(dim, 0, size)
    return made[:1].expand(made.shape) if shape and chance.random() < 0.1 else made


def drawn_calls(chance: random.Random, count: int) -> Iterator[Case]:
    """Yield calls of the operations whose result is known without a kernel, on real tensors."""
    known = sorted(fake_run.POINTWISE | fake_run.IN_PLACE | fake_run.COPIES, key=str)
    formats = (None, torch.preserve_format, torch.contiguous_format)
    for _ in range(count):
        func = chance.choice(known)
        dtypes = [chance.choice((torch.float32, torch.bfloat16)) for _ in range(3)]
        dtypes = dtypes if chance.random() < 0.2 else dtypes[:1] * 3
        shape = [chance.choice((1, 2, 3, 5)) for _ in range(chance.randint(0, 4))]
        first = drawn(chance, shape, dtypes[0])
        kwargs: dict[str, Any] = {}
        if func in fake_run.COPIES:
            kwargs["memory_format"] = chance.choice(formats)
            if func is aten._to_copy.default:
                kwargs["dtype"] = dtypes[1]
        args: list[Any] = [first]
        for argument, dtype in zip(func._schema.arguments[1:], dtypes[1:], strict=False):
            if argument.kwarg_only:
                break
            if str(argument.type) == "Tensor":
                smaller = [1 if chance.random() < 0.3 else size for size in shape[chance.choice((0, 0, 1)) :]]
                args.append(drawn(chance, smaller, dtype))
            else:
                args.append(1j if chance.random() < 0.1 else 0.5)
        if len(args) == 2 and func in fake_run.POINTWISE and chance.random() < 0.3:
            args.reverse()
        yield func, tuple(args), kwargs


def test_a_known_result_is_that_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of drawn layouts, dtypes and sizes: shape, strides but of dimensions of size 1, and dtype."""
    monkeypatch.setattr(fake_run, "PLAIN", frozenset())  # No meta kernel runs instead.
    chance, num_known = random.Random(5), Counter[Any]()
    mode = FakeTensorMode()
    for func, args, kwargs in drawn_calls(chance, 1200):
        fakes = [mode.from_tensor(one) if isinstance(one, Tensor) else one for one in args]
        if not isinstance(fakes[0], Tensor):
            continue
        with mode:
            found = fake_run._by_meta_kernel(func, fakes, dict(kwargs))
        if found is None:
            continue
        expected = func(*args, **kwargs)
        num_known[func] += 1
        assert (found is fakes[0]) == (expected is args[0]), func
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), func
        strides = [
            [step for step, size in zip(one.stride(), one.shape, strict=True) if size > 1]
            for one in (found, expected)
        ]
        assert strides[0] == strides[1], (func, [one.stride() for one in args if isinstance(one, Tensor)])
    assert set(num_known) == fake_run.POINTWISE | fake_run.IN_PLACE | fake_run.COPIES
    assert num_known.total() > 500


def test_one_of_our_operators_gives_what_fake_tensor_mode_gives() -> None:
    """Two results, one, and none."""
    gradients_in_forward.register()
    rms_norm_op.register()
    swiglu_op.register()
    ours = torch.ops.trainfit
    with FakeTensorMode():
        x = _fake(4, 6, dtype=torch.bfloat16)
        calls: list[tuple[Any, ...]] = [
            (ours.own_rms_norm.default, x, _fake(6), 1e-6),
            (ours.swiglu.default, x, x),
            (ours.multiply_unless_one_.default, x, _fake()),
        ]
        for func, *args in calls:
            place = fake_run._place_of(args)
            assert place is not None
            short, long = fake_run._by_our_kernel(func.fake, args, *place), func(*args)
            if long is None:
                assert short is None
                continue
            for a, b in zip(*map(tensors_of, (short, long)), strict=True):
                assert (type(a), a.shape, a.stride(), a.dtype) == (FakeTensor, b.shape, b.stride(), b.dtype)
                assert a.device == b.device


def test_with_a_real_tensor_fake_tensor_mode_decides() -> None:
    real = torch.tensor(2.0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert fake_run._by_meta_kernel(aten.mul.Tensor, (_fake(3), real), {}) is None


class _Knot:
    """Holds itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_a_process_that_only_traces_unfreezes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_state, "_freezes_for_good", False)
    process_state.freeze_for_good()
    try:
        made = [[] for _ in range(100_000)]
        with frozen_gc():
            assert len(gc.get_objects()) < len(made)  # None of them is visited by a collection.
        assert gc.get_freeze_count() > len(made)
    finally:
        gc.unfreeze()


def test_frozen_collection_still_finds_new_cycles() -> None:
    num_before = len(gc.get_objects())
    with frozen_gc(), frozen_gc():
        assert gc.get_freeze_count() > 0.9 * num_before
        assert len(gc.get_objects()) < 0.1 * num_before
        knot = weakref.ref(_Knot())
        gc.collect()
        assert knot() is None
    assert gc.get_freeze_count() == 0
    assert len(gc.get_objects()) > 0.9 * num_before


def test_objects_that_the_caller_froze_stay_frozen() -> None:
    gc.freeze()
    try:
        with frozen_gc():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("patch", [no_packed_sequences, grouped_heads_counted, quiet_imports])
def test_a_second_thread_waits_for_a_process_wide_patch(
    patch: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nested in time, the second thread would restore the first one's patch."""
    for name in LOGGERS:  # The command line silences them for its whole process.
        monkeypatch.setattr(logging.getLogger(name), "level", logging.WARNING)

    def state() -> tuple[Any, ...]:
        functions = masking_utils.find_packed_sequence_indices, flop_counter.sdpa_flop_count
        return *functions, *(logging.getLogger(name).level for name in LOGGERS)

    def enter() -> None:
        with patch():
            entered.set()

    before, entered = state(), threading.Event()
    with patch():
        other = threading.Thread(target=enter)
        other.start()
        assert not entered.wait(0.1)
        assert state() != before
    other.join(60)
    assert entered.is_set()
    assert state() == before
