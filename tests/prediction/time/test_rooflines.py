"""Operations that were not timed: the roofline of their kind, never another kind's rows."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainfit
from evidence.scripts.operations_without_rows import predict
from trainfit.catalog.load import gpu
from trainfit.catalog.operation_kinds import operation_kinds
from trainfit.ledger.ledger import Op
from trainfit.prediction.machine import machine_with
from trainfit.prediction.time.calibrated import calibrated
from trainfit.prediction.time.device_time import op_s
from trainfit.prediction.time.op_times import OpTimes
from trainfit.spec.calibration import OpTime
from trainfit.spec.hardware import PeakDtype
from trainfit.virtual.cuda.op_kinds import CHANNELS_LAST, POINTWISE
from trainfit.virtual.cuda.op_layout import layout, product_dtype, product_shape

aten = torch.ops.aten
H200 = gpu("h200")
MB = 2**20
ROOT = Path(__file__).parents[3]
H100_ROWS = ROOT / "evidence" / "records" / "script-steps" / "h100-operations-without-rows.json"
ADD = OpTime("aten.add.Tensor", "bfloat16", "", (), "", 0, 0, False, 0.0, 64 * MB, 2e-5, "")
CONVOLUTION = Op(
    "aten.convolution.default", "", 0, 0, 1e12, 1e12, 1e12, 1e12, 64 * MB, "bfloat16",
    shape=(1, 128 * 56 * 56, 512, 576), layout=CHANNELS_LAST,
)  # fmt: skip


def roofline_s(op: Op, peak: PeakDtype = "bf16") -> float:
    """Return the longer of FLOPs and bytes at an H200's data sheet, without the shares of a kind."""
    assert H200.memory_bytes_per_s is not None
    return max(op.causal_flops / H200.peak_flops_per_s[peak], op.num_bytes / H200.memory_bytes_per_s)


def test_flops_are_never_priced_by_rows_of_bytes() -> None:
    """A calibration with additions alone says nothing of a convolution, a sort or an own operation."""
    times = OpTimes([ADD], H200)
    sort = Op("aten.sort.default", "", 0, 0, 0, 0, 0, 0, 64 * MB, "bfloat16")
    assert times.seconds(CONVOLUTION) is None
    assert times.seconds(sort) is None
    assert times.seconds(sort._replace(name="mylib.fused_block.default", causal_flops=1e9)) is None
    for alike in ("aten.sin.default", "fsdp.chunk_cat.default", "fsdp.split_with_sizes_copy.default"):
        assert times.seconds(sort._replace(name=alike)) == pytest.approx(2e-5, rel=0.01)


def test_an_operation_takes_its_rows_of_another_dtype() -> None:
    sort = OpTime("aten.sort.default", "int64", "", (), "", 0, 0, False, 0.0, 64 * MB, 3e-4, "")
    found = OpTimes([ADD, sort], H200).seconds(
        Op("aten.sort.default", "", 0, 0, 0, 0, 0, 0, 64 * MB, "float32")
    )
    assert found == pytest.approx(3e-4, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "low", "high"),
    [
        ({}, 1.3, 1.6),
        ({"causal_flops": 1e6}, 1.2, 1.8),  # Its bytes decide.
        ({"layout": ""}, 1.3, 1.7),
        ({"causal_flops": 1e6, "layout": ""}, 3.5, 4.5),  # Copied to channels last, and back.
        ({"layout": POINTWISE}, 5.0, 6.0),
        ({"shape": (1, 128 * 56 * 56, 64, 576)}, 2.7, 3.1),  # Half of a tile
        ({"dtype": "float16"}, 1.3, 1.6),
    ],
)
def test_a_convolution_takes_its_roofline(changes: dict[str, object], low: float, high: float) -> None:
    op = CONVOLUTION._replace(**changes)  # pyright: ignore[reportArgumentType]
    assert low < op_s(op, machine_with(H200)) / roofline_s(op) < high


def test_a_depthwise_convolution_has_no_tensor_cores() -> None:
    op = CONVOLUTION._replace(shape=(512, 128 * 56 * 56, 1, 49))
    assert op_s(op, machine_with(H200)) > 2 * roofline_s(op, "fp32")
    assert (
        op_s(op._replace(shape=(32, 128 * 56 * 56, 16, 144)), machine_with(H200))
        < op_s(op, machine_with(H200)) / 5
    )
    assert op_s(op._replace(layout=""), machine_with(H200)) > 4 * op_s(
        op, machine_with(H200)
    )  # PyTorch's own kernels


@pytest.mark.parametrize("name", ["a100-sxm4-80gb", "h100-sxm", "rtx-4090", "v100-sxm2-32gb"])
def test_other_gpus_take_their_own_rooflines(name: str) -> None:
    row, op = gpu(name), CONVOLUTION._replace(dtype="float16")
    assert 1.0 < op_s(op, machine_with(row)) * row.peak_flops_per_s["fp16"] / op.causal_flops < 3.0


def test_every_kind_has_a_sane_roofline() -> None:
    """Nothing is faster than the data sheet, or a hundred times slower."""
    names = [f"aten.{name}.default" for row in operation_kinds().values() for name in row.operations]
    for name in [*names, "mylib.own.default", "aten.frobnicate.default"]:
        op = Op(name, "", 0, 0, 0, 0, 0, 0, 256 * MB, "float32")
        assert 0.9 * roofline_s(op) < op_s(op, machine_with(H200)) < 100 * roofline_s(op), name
        op = op._replace(causal_flops=1e12)
        if not calibrated(H200).times.has(op):
            assert roofline_s(op, "fp32") < op_s(op, machine_with(H200)) < 15 * roofline_s(op, "fp32"), name


def test_a_convolution_is_a_product_of_its_points_and_filters() -> None:
    x = torch.empty(8, 64, 30, 30).to(memory_format=torch.channels_last)
    weight, options = torch.empty(128, 64, 3, 3), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    args = (x, weight, None, *options)
    out = torch.convolution(*args)
    assert product_shape(aten.convolution.default, args) == (1, 8 * 28 * 28, 128, 64 * 9)
    assert layout(aten.convolution.default, args, out) == CHANNELS_LAST
    assert layout(aten.convolution.default, (x.contiguous(), *args[1:]), out) == ""
    backward = (out, x, weight, [0], *options, [True, True, False])
    assert product_shape(aten.convolution_backward.default, backward) == (1, 8 * 28 * 28, 128, 64 * 9)
    upsampled = (x, torch.empty(64, 32, 2, 2), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1)
    assert product_shape(aten.convolution.default, upsampled) == (1, 8 * 30 * 30, 64, 32 * 4)
    one_dimension = (torch.empty(2, 16, 50), torch.empty(16, 1, 4), None, [1], [3], [1], False, [0], 16)
    assert product_shape(aten.convolution.default, one_dimension) == (16, 2 * 53, 1, 4)


def test_fp32_convolutions_run_in_tf32_and_products_do_not() -> None:
    assert product_dtype(aten.convolution.default, "float32", (9, 0)) == "tf32"
    assert product_dtype(aten.convolution.default, "float32", (7, 0)) == "float32"
    assert product_dtype(aten.convolution.default, "bfloat16", (9, 0)) == "bfloat16"
    assert product_dtype(aten.mm.default, "float32", (9, 0)) == "float32"
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert product_dtype(aten.mm.default, "float32", (9, 0)) == "tf32"
        assert product_dtype(aten.add.Tensor, "float32", (9, 0)) == "float32"
    finally:
        torch.set_float32_matmul_precision(before)


class Blocks(nn.Module):
    """Convolutions of many kinds, with what images and sequences have around them."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.GELU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 7, padding=3, groups=64), nn.GroupNorm(8, 64), nn.Conv2d(64, 128, 1),
            nn.ConvTranspose2d(128, 32, 2, 2), nn.Upsample(scale_factor=2), nn.Conv2d(32, 8, 3, groups=4),
        )  # fmt: skip
        self.sequences = nn.Conv1d(256, 256, 4, padding=3, groups=256)

    def forward(self, images: Tensor, sequences: Tensor) -> Tensor:
        y = torch.fft.irfft(torch.fft.rfft(self.sequences(sequences).float()))
        return self.images(images).square().mean() + F.silu(y).sort(-1).values.square().mean()


def test_a_step_of_convolutions() -> None:
    """Milliseconds, where FLOPs priced as bytes made seconds; the kinds without rows are stated."""

    def train() -> None:
        model = Blocks().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(
                    torch.randn(64, 3, 224, 224, device="cuda"), torch.randn(8, 256, 4096, device="cuda")
                )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    traced = trainfit.trace(train, steps=2)
    assert traced.step_s is not None
    assert 0.003 < traced.step_s < 0.03
    stated = next(text for text in traced.assumptions if "rooflines" in text)
    for kind in ("channels first", "depthwise", "normalization", "window"):
        assert kind in stated
    assert not traced.ops_without_flops


def test_operations_measured_on_an_h100() -> None:
    """A fit: the rows that the shares were set by, forward and backward; sorts have rows of other lengths."""
    measured = json.loads(H100_ROWS.read_text())["rows"]
    host_bound = 3.2e-4  # Backwards that took the host's time, whatever their work
    for row, (forward_s, backward_s) in zip(measured, predict("h100-sxm"), strict=True):
        if row["kind"] == "sort":
            continue
        assert 0.65 < row["forward_s"] / forward_s < 1.45, row
        if backward_s is not None and row["backward_s"] > host_bound:
            assert 0.65 < row["backward_s"] / backward_s < 1.45, row


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_a_recurrent_layer_is_one_operation(kind: Callable[..., nn.RNNBase], gates: int) -> None:
    """Its FLOPs: 2 x gates x units x (input + units) for each position of both layers and directions."""

    def train() -> None:
        model = kind(16, 32, 2, batch_first=True, bidirectional=True).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                out, _ = model(torch.randn(8, 10, 16, device="cuda", requires_grad=True))
            assert out.shape == (8, 10, 64)
            assert out.dtype == torch.bfloat16
            out.float().square().mean().backward()
            assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()

    traced = trainfit.trace(train, steps=2)
    assert traced.model_flops == 3 * 8 * 10 * 2 * 2 * gates * 32 * ((16 + 32) + (64 + 32))
    assert not traced.ops_without_flops
    assert traced.time is not None
    assert traced.time.matmul_s == pytest.approx(10 * 4 * (25.7e-6 + 19.6e-6), rel=0.1)


def test_two_small_convolutions() -> None:
    """Two 3x3 convolutions of 64 channels: at most a launch-bound step, not 20 ms each."""

    def train() -> None:
        layers = [nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(2)]
        model = nn.Sequential(*layers).cuda().bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(128, 64, 56, 56, device="cuda", dtype=torch.bfloat16)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    traced = trainfit.trace(train)
    assert traced.time is not None
    assert traced.model_flops == 2 * 128 * 56 * 56 * 64 * 64 * 9 * (
        3 + 2
    )  # The first needs no input gradient.
    assert 1.5e-4 < traced.time.matmul_s < 1e-3
    assert traced.step_s is not None
    assert traced.step_s < 5e-3
