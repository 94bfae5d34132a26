"""FLOPs and bytes by operation: against torch's own counter, closed forms and published counts."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from trainfit.virtual.cuda.bytes_moved import bytes_moved
from trainfit.virtual.cuda.flops import NONE, OpFlops, count, flop_rule, pairs

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


class Counter(TorchDispatchMode):
    """Sums our counts over what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.total = OpFlops(0, 0, 0, 0)
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = count(func, args, kwargs or {}, out)
        if found is None:
            self.unknown.add(str(func))
        else:
            self.total = OpFlops(*(a + b for a, b in zip(self.total, found, strict=True)))
        return out


def ours(func: Any, *args: Any, **kwargs: Any) -> OpFlops | None:
    return count(func, args, kwargs, func(*args, **kwargs))


# -- against torch's counter ---------------------------------------------------------------------------------


def _mlp() -> torch.Tensor:
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64, bias=False))
    return net(torch.empty(8, 32, 64, requires_grad=True)).sum()


def _image_model() -> torch.Tensor:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, stride=2, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
        torch.nn.ConvTranspose2d(16, 8, 4, stride=2), torch.nn.MaxPool2d(2), torch.nn.Flatten(),
        torch.nn.Linear(8 * 17 * 17, 10),
    )  # fmt: skip
    return F.cross_entropy(
        net(torch.empty(4, 3, 32, 32, requires_grad=True)), torch.empty(4, dtype=torch.int64)
    )


def _transformer_layer() -> torch.Tensor:
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return layer(torch.empty(2, 16, 64, requires_grad=True)).sum()


@pytest.mark.parametrize("model", [_mlp, _image_model, _transformer_layer])
def test_a_step_counts_as_torch_counts_it(model: Any) -> None:
    counter = Counter()
    with FlopCounterMode(display=False) as theirs, counter:
        model().backward()
    assert counter.total.full == theirs.get_total_flops() > 0
    assert counter.unknown == set()


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("suffix", ["", "_backward"])
def test_fused_attention_counts_as_torch_counts_it(kernel: str, suffix: str) -> None:
    q, kv = torch.empty(2, 8, 100, 64), torch.empty(2, 8, 72, 64)
    func = getattr(aten, f"_scaled_dot_product_{kernel}_attention{suffix}")
    args = (q, q, kv, kv) if suffix else (q, kv, kv)
    found = count(func.default, args, {}, None)
    assert found is not None
    assert found.full == flop_registry[func](*args, *([None] * 10 if suffix else []), out_val=None)


def test_every_product_counts_as_torch_counts_it() -> None:
    a, b = torch.empty(30, 40), torch.empty(40, 50)
    batch_a, batch_b = torch.empty(3, 30, 40), torch.empty(3, 40, 50)
    for func, *args in (
        (aten.mm, a, b), (aten.addmm, torch.empty(50), a, b), (aten.bmm, batch_a, batch_b),
        (aten.baddbmm, torch.empty(3, 30, 50), batch_a, batch_b),
    ):  # fmt: skip
        out = func.default(*args)
        assert count(func.default, tuple(args), {}, out) == (flop_registry[func](*args, out_val=out),) * 4


# -- closed forms --------------------------------------------------------------------------------------------


def test_pairs_are_those_of_the_mask() -> None:
    for seq_q, seq_k, window in product((1, 5, 8), (1, 5, 8, 11), (None, 0, 2, 7)):
        seen = sum(j <= i and (window is None or i - j <= window) for i in range(seq_q) for j in range(seq_k))
        if seq_q <= seq_k or window is None:
            assert pairs(seq_q, seq_k, True, window) == seen, (seq_q, seq_k, window)
        assert pairs(seq_q, seq_k, False) == seq_q * seq_k


def test_causal_attention_is_the_triangle() -> None:
    q = torch.empty(1, 2, 1000, 64)
    found = ours(aten._scaled_dot_product_flash_attention.default, q, q, q, 0.0, True)
    assert found is not None
    assert found.full == 4 * 2 * 64 * 1000 * 1000
    assert found.causal == 4 * 2 * 64 * 1000 * 1001 // 2


def test_a_fused_backward_computes_the_scores_once_more() -> None:
    q = torch.empty(1, 2, 256, 64)
    found = count(aten._scaled_dot_product_flash_attention_backward.default, (q, q, q, q), {}, None)
    forward = ours(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q)
    assert found is not None
    assert forward is not None
    assert (found.full, found.model_full) == (forward.full * 5 // 2, forward.full * 2)


def test_grouped_products_count_every_token_once() -> None:
    tokens, experts = torch.empty(4096, 512), torch.empty(8, 512, 256)
    out = torch.empty(4096, 256)
    assert count(aten._grouped_mm.default, (tokens, experts), {}, out) == (2 * 4096 * 512 * 256,) * 4
    # The weight's gradient: [512, 4096] x [4096, 256], tokens shared among the experts.
    assert count(aten._grouped_mm.default, (tokens.t(), out), {}, experts) == (2 * 4096 * 512 * 256,) * 4


def test_grouped_convolutions_count_their_own_channels() -> None:
    x = torch.empty(1, 16, 8, 8, requires_grad=True)
    counter = Counter()
    with counter:
        F.conv2d(x, torch.empty(16, 1, 3, 3, requires_grad=True), padding=1, groups=16).sum().backward()
    depthwise = 2 * 8 * 8 * 16 * 9
    assert counter.total.full == 3 * depthwise


# -- what has no rule ----------------------------------------------------------------------------------------


def test_matrix_work_without_a_rule_is_reported() -> None:
    assert ours(aten.linalg_qr.default, torch.empty(8, 8)) is None
    assert ours(aten._cdist_forward.default, torch.empty(8, 4), torch.empty(8, 4), 2.0, None) is None


def test_elementwise_work_and_data_movement_are_zero() -> None:
    x, i = torch.empty(8, 8), torch.empty(8, dtype=torch.int64)
    for func, args in [
        (aten.mul.Tensor, (x, x)), (aten.add_.Tensor, (x, x)), (aten.sum.dim_IntList, (x, [0])),
        (aten.t.default, (x,)),
        (aten.embedding.default, (x, i)), (aten.cat.default, ([x, x],)), (aten._foreach_add_.List, ([x],
        [x])),
        (aten.native_dropout.default, (x, 0.1, True)), (aten._softmax.default, (x, -1, False)),
        (aten.zeros.default, ([4],)), (aten.topk.default, (x, 2)), (aten.index_put_.default, (x, [i], x)),
        (aten.bernoulli_.float, (x, 0.5)), (aten.masked_fill_.Scalar, (x, x > 0, 0.0)),
    ]:  # fmt: skip
        assert ours(func, *args) == NONE, func


def test_two_rules_for_one_op_are_refused() -> None:
    with pytest.raises(ValueError, match="aten::mm has a FLOP rule already"):
        flop_rule("aten::mm")(lambda args, kwargs, out: NONE)


# -- bytes ---------------------------------------------------------------------------------------------------


def moved(func: Any, *args: Any, **kwargs: Any) -> int:
    return bytes_moved(func, args, kwargs, func(*args, **kwargs))


def test_bytes_of_products_views_and_elementwise_work() -> None:
    a, b = torch.empty(100, 200), torch.empty(200, 300)
    assert moved(aten.mm.default, a, b) == 4 * (100 * 200 + 200 * 300 + 100 * 300)
    assert moved(aten.t.default, a) == 0
    assert moved(aten.view.default, a, [-1]) == 0
    assert moved(aten.mul.Tensor, a, a) == 3 * a.numel() * 4
    assert moved(aten.add_.Tensor, a, a) == 3 * a.numel() * 4
    assert moved(aten._to_copy.default, a, dtype=torch.bfloat16) == a.numel() * 6
    assert moved(aten.copy_.default, a, torch.empty(100, 200, dtype=torch.bfloat16)) == a.numel() * 6
    assert moved(aten.zero_.default, a) == a.numel() * 4
    assert moved(aten.empty_like.default, a) == 0
    assert moved(aten.contiguous.default, a) == 0
    assert moved(aten.contiguous.default, a.t()) == 2 * a.numel() * 4
    assert moved(aten.max.default, a) == a.numel() * 4 + 4
    assert moved(aten.max.default, a.t()) == 3 * a.numel() * 4 + 4


def test_indexing_touches_the_rows_it_names() -> None:
    table, index = torch.empty(128_000, 512), torch.empty(64, dtype=torch.int64)
    assert moved(aten.embedding.default, table, index) == 64 * 8 + 2 * 64 * 512 * 4
    assert moved(aten.index_select.default, table, 0, index) == 64 * 8 + 2 * 64 * 512 * 4
    values = torch.empty(64, 512)
    assert moved(aten.index_add_.default, table, 0, index, values) == 64 * 8 + 3 * 64 * 512 * 4

    # A broadcast input is read once.
    x, row = torch.empty(100, 200), torch.empty(200)
    assert moved(aten.add.Tensor, x, row) == (2 * 100 * 200 + 200) * 4
    assert moved(aten.clone.default, row.expand(100, 200)) == (200 + 100 * 200) * 4


def test_lists_are_summed() -> None:
    """AdamW reads four tensors and writes three of them."""
    xs = [torch.empty(10), torch.empty(20)]
    assert moved(aten._foreach_mul_.Scalar, xs, 2.0) == 2 * 30 * 4
    assert moved(aten._foreach_add.List, xs, xs) == 3 * 30 * 4
    p, g, m, v = (torch.empty(1000) for _ in range(4))
    step = torch.empty(())
    found = moved(
        aten._fused_adamw_.default, [p], [g], [m], [v], [], [step],
        lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    assert found == 7 * 4000 + 4
