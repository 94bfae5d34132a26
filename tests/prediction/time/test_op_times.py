"""The nearest timed operations: compiled kernels by name, attention by tiles, what a cache holds."""

import pytest

from trainfit.catalog.constants import constants
from trainfit.catalog.load import FOLDER, gpu
from trainfit.catalog.rates import rates
from trainfit.ledger.ledger import Op
from trainfit.prediction.machine import machine_with
from trainfit.prediction.time.calibrated import calibrated
from trainfit.prediction.time.device_time import op_s
from trainfit.prediction.time.op_times import OpTimes, work_of
from trainfit.spec.calibration import OpTime, calibration_of

MB = 2**20


def row(name: str, num_bytes: int, seconds: float, **changes: object) -> OpTime:
    return OpTime(name, "bfloat16", "", (), "", 0, 0, False, 0.0, num_bytes, seconds, "")._replace(**changes)


def op(name: str, num_bytes: int, flops: float = 0.0, kernel: str = "", head: int = 0, seq: int = 0) -> Op:
    return Op(
        name, "m", 0, 0, flops, flops, 0, 0, num_bytes, "bfloat16", kernel=kernel, head=head, seq=seq
    )  # fmt: skip


def test_a_compiled_kernel_takes_the_rate_of_those_with_the_same_words() -> None:
    """Sizes are equal, so only names tell a slow reduction from fast pointwise kernels."""
    slow = row("triton_red_fused_log_softmax_3", 512 * MB, 4e-4)
    fast = [row(f"triton_poi_fused_mul_silu_{n}", 512 * MB, 1.2e-4) for n in range(4)]
    times = OpTimes([slow, *fast], gpu("h200"))
    assert times.seconds(op("triton_red_fused_log_softmax_7", 512 * MB)) == pytest.approx(4e-4, rel=0.1)
    assert times.seconds(op("triton_poi_fused_add_mul_silu_7", 512 * MB)) == pytest.approx(1.2e-4, rel=0.1)


def test_a_compiled_cast_to_fp8_takes_longer_than_its_nearest_timed_kernel() -> None:
    cast, card = op("triton_poi_fused__scaled_mm__to_copy_clamp_mul_4", 64 * MB), gpu("h200")
    alone_s = calibrated(card).times.seconds(cast)
    assert alone_s is not None
    assert op_s(cast, machine_with(card)) == pytest.approx(rates().fp8_casts * rates().memory * alone_s)


def test_what_was_timed_in_the_cache_is_no_faster_than_the_memory_when_it_leaves_the_cache() -> None:
    bandwidth = gpu("h200").memory_bytes_per_s
    assert bandwidth is not None
    cached = row("aten.mul.Tensor", 20 * MB, 20 * MB / (2 * bandwidth))
    times = OpTimes([cached], gpu("h200"))
    small, large = 40 * MB, 2**30
    assert small < (gpu("h200").cached_bytes or 0) < large
    within, beyond = (times.seconds(op("aten.mul.Tensor", size)) for size in (small, large))
    assert within is not None
    assert within < small / bandwidth
    assert beyond == pytest.approx(large / bandwidth)


@pytest.mark.parametrize(("kernel", "tile"), [("cudnn", 128), ("flash", 128), ("efficient", 64)])
def test_attention_computes_whole_tiles(kernel: str, tile: int) -> None:
    """A length just above 1,024 takes as long as its last tile were full."""
    name, seq = "aten._scaled_dot_product_attention.default", 1032
    rate = 5e14

    def flops(tokens: int) -> float:
        return 1e6 * tokens**2

    times = OpTimes(
        [row(name, MB, flops(1024) / rate, kernel=kernel, head=64, seq=1024, flops=flops(1024))], gpu("h200")
    )
    found = times.seconds(op(name, MB, flops(seq), kernel, 64, seq))
    assert found == pytest.approx(flops(1024 + tile) / rate, rel=0.02)


def test_attention_longer_than_all_rows_has_the_rate_of_the_longest() -> None:
    """Rows of 1,024 and 8,192 tokens are about as far from 262,144; their mean would be that of neither."""
    name = "aten._scaled_dot_product_attention.default"
    rates = {1024: 2e14, 2048: 3e14, 4096: 4e14, 8192: 5e14}
    rows = [
        row(name, MB, 1e13 / rate, kernel="cudnn", head=128, seq=seq, flops=1e13)
        for seq, rate in rates.items()
    ]
    times = OpTimes(rows, gpu("h200"))

    def rate(seq: int, flops: float) -> float:
        found = times.seconds(op(name, MB, flops, "cudnn", 128, seq))
        assert found is not None
        return flops / found

    for seq in (16384, 262144):
        assert rate(seq, 1e13 * (seq / 8192) ** 2) == pytest.approx(5e14, rel=0.06)
    sixteen_times = 16e13
    assert rate(8320, sixteen_times * (8320 / 8192) ** 2) == pytest.approx(
        rate(8192, sixteen_times), rel=1e-3
    )


@pytest.mark.parametrize("head", [80, 256])
def test_gpus_without_hoppers_kernels_have_rows_of_the_plain_ones(head: int) -> None:
    """On an H200 `calibrate` times the plain kernels with heads of 80 alone."""
    ops = calibration_of((FOLDER / "calibrations" / "h200.json").read_bytes(), "h200.json").ops
    rows = {(row.kernel, row.head, row.seq) for row in ops}
    assert {("plain", head, seq) for seq in (256, 1024, 4096, 8192)} <= rows


@pytest.mark.parametrize("name", ["h200", "a100-sxm4-80gb", "rtx-4090"])
def test_a_product_in_fp32_fills_the_multiprocessors_of_its_own_gpu(name: str) -> None:
    """As many tiles as multiprocessors take one wave, one more takes a second, of which it fills little."""
    num_sms = gpu(name).num_sms
    assert num_sms is not None

    def product(tiles: int) -> OpTime:
        shape = (1, 256, 128 * tiles, 8192)
        flops = 2.0 * 256 * 128 * tiles * 8192
        return OpTime("aten.mm.default", "float32", "", shape, "", 0, 0, False, flops, 1, 1.0, "")

    def longer(tiles: int) -> float:
        row = product(tiles)
        return work_of(row, gpu(name), constants().operations) / row.flops

    assert longer(num_sms) == 1.0
    assert longer(num_sms + 1) > 1.0


def test_what_stays_in_the_cache_is_that_of_the_calibrated_gpu() -> None:
    """The A100's L2 holds 40 MiB, of which 45 MiB leave nothing."""
    card = gpu("a100-sxm4-80gb")
    bandwidth = card.memory_bytes_per_s
    assert bandwidth is not None
    assert card.l2_cache_bytes == 40 * MB
    cached = row("aten.mul.Tensor", 20 * MB, 20 * MB / (2 * bandwidth))
    found = OpTimes([cached], card).seconds(op("aten.mul.Tensor", 45 * MB))
    assert found == pytest.approx(45 * MB / bandwidth)


def test_a_single_query_is_not_padded_as_its_keys_are() -> None:
    """A step of decoding with a cache of 257 positions: 32 sequences, 12 heads of 128."""
    flops = 4 * 32 * 12 * 257 * 128
    op = Op(
        "aten._scaled_dot_product_cudnn_attention.default", "", 0, -1, flops, flops, flops, flops, 8_652_304,
        "bfloat16", kernel="cudnn", head=128, seq=1,
    )  # fmt: skip
    assert op_s(op, machine_with(gpu("h100-sxm"))) < 60e-6


@pytest.mark.parametrize(
    ("layout", "free"), [("nt", "m"), ("nn", "m"), ("tn", "k"), ("tt", "")], ids=["nt", "nn", "tn", "tt"]
)
def test_only_rows_in_memory_need_to_be_aligned(layout: str, free: str) -> None:
    """A step of decoding multiplies as many rows as there are sequences, at the speed of eight."""

    def seconds(**sizes: int) -> float:
        m, n, k = ({"m": 64, "n": 4096, "k": 4096} | sizes).values()
        flops, num_bytes = 2.0 * m * n * k, 2 * (m * n + n * k + m * k)
        op = Op(
            "aten.mm.default", "", 0, 0, flops, flops, flops, flops, num_bytes, "bfloat16",
            shape=(1, m, n, k), layout=layout,
        )  # fmt: skip
        return op_s(op, machine_with(gpu("h100-sxm")))

    for name, size in {"m": 64, "n": 4096, "k": 4096}.items():
        odd = seconds(**{name: size - 1}) / seconds()
        assert (odd < 1.05) == (name == free)
