"""Attention's time follows from what its kernel reached where it was measured."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest

from trainfit.catalog.attention import AttentionRate, AttentionRun, Kernel, attention_runs
from trainfit.catalog.constants import constants
from trainfit.catalog.load import gpu
from trainfit.ledger.ledger import Ledger, Op, Segment
from trainfit.prediction.predict import ledger_of, predict
from trainfit.prediction.time import attention_time
from trainfit.prediction.time.attention_time import assumptions, compute_share
from trainfit.prediction.time.device_time import least_s
from trainfit.prediction.time.peaks import peak_flops_per_s
from trainfit.spec.recipe import Batch, Recipe
from virtual_runs import recipe_of, with_layers

H200, A100 = gpu("h200"), gpu("a100-sxm4-80gb")
RATES = [rate for run in attention_runs() for rate in run.rates]
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def op_of(rate: AttentionRate, *, backward: bool, **fields: Any) -> Op:
    """The measured operation itself, with the FLOPs that the kernel executes."""
    products = {"plain": 7, "passes": 8}.get(rate.kernel, 5) if backward else 2
    pairs = rate.seq * (rate.seq + 1) // 2 if rate.causal else rate.seq**2
    flops = 2.0 * products * rate.batch * rate.heads * pairs * rate.head
    name = "attention_backward" if backward else "attention"
    op = Op(name, "", 0, -1, flops, flops, flops, flops, 0, DTYPES[rate.dtype])
    return op._replace(kernel=rate.kernel, head=rate.head, seq=rate.seq, masked=rate.masked)._replace(
        **fields
    )


def test_what_was_measured_takes_what_it_took_and_stays_below_the_peak() -> None:
    """Every row of the catalog, forward and backward."""
    assert {rate.kernel for rate in RATES} == set(get_args(Kernel))
    for rate in RATES:
        for backward, seconds in ((False, rate.forward), (True, rate.backward)):
            assert alone_s(op_of(rate, backward=backward)) == pytest.approx(seconds)
            assert rate.flops_per_s(backward=backward) < peak_flops_per_s(H200, rate.dtype)


def rate_of(kernel: str, dtype: str, head: int, seq: int) -> AttentionRate:
    return next(one for one in RATES if one.key == (kernel, dtype, head, seq, False))


def test_another_size_takes_the_nearest_and_says_so() -> None:
    measured = rate_of("cudnn", "bf16", 64, 8192)
    wanted = op_of(measured, backward=False)._replace(head=80, seq=7000)
    assert compute_share(wanted, H200) == compute_share(op_of(measured, backward=False), H200)
    ledger = Ledger(segments=[Segment("steady", "forward")], ops=[wanted, wanted])
    assert assumptions(ledger, H200) == (
        "attention's time, cudnn kernel, bfloat16, heads of 80 at 7000: as measured on h200 with heads of "
        "64 at 8192, the nearest measured",
    )
    (elsewhere,) = assumptions(ledger, A100)
    assert elsewhere.endswith("the nearest measured, at the same share of the peak")
    exact = Ledger(segments=ledger.segments, ops=[op_of(measured, backward=False)])
    assert assumptions(exact, H200)[0].endswith("as measured on h200 with heads of 64 at 8192")


def test_our_plain_kernels_pay_for_the_columns_they_round_up_to() -> None:
    whole = op_of(rate_of("plain", "bf16", 256, 2048), backward=True)
    assert compute_share(whole._replace(head=192), H200) == pytest.approx(compute_share(whole, H200) * 0.75)
    assert "(it computes heads of 256)" in assumptions(
        Ledger(segments=[Segment("steady", "backward")], ops=[whole._replace(head=192)]), H200
    )[0]  # fmt: skip


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[AttentionRate]]:
    """Rates to fill, which stand for the catalog's."""
    rates: list[AttentionRate] = []

    def runs() -> tuple[AttentionRun, ...]:
        known = {"gpu": "h200", "measured_at": "2026", "torch": "2", "experiment": "attention"}
        return (AttentionRun.model_validate({**known, "rates": tuple(rates)}),)

    monkeypatch.setattr(attention_time, "attention_runs", runs)
    attention_time._rate.cache_clear()
    yield rates
    attention_time._rate.cache_clear()


def a_rate(
    kernel: str, dtype: str, head: int = 128, *, masked: bool = False, seconds: float = 1e-3
) -> AttentionRate:
    fields = {"seq": 2048, "heads": 16, "batch": 4, "forward": seconds, "backward": 3 * seconds}
    known = {"kernel": kernel, "dtype": dtype, "head": head, "causal": not masked, "masked": masked}
    return AttentionRate.model_validate({**known, **fields})


def assumption_of(op: Op) -> str:
    (line,) = assumptions(Ledger(segments=[Segment("steady", "forward")], ops=[op]), H200)
    return line


def test_a_kernel_without_a_rate_in_a_dtype_is_told(made_up: list[AttentionRate]) -> None:
    made_up.append(a_rate("efficient", "fp32"))
    wanted = op_of(made_up[0], backward=False)._replace(dtype="bfloat16")
    assert compute_share(wanted, H200) == constants().shares.attention_unmeasured
    assert "nothing is measured" in assumption_of(wanted)


def test_without_a_measured_mask_16_bits_take_what_steps_need_and_fp32_the_rate_without(
    made_up: list[AttentionRate],
) -> None:
    made_up += [a_rate("cudnn", "bf16"), a_rate("efficient", "fp32", 64)]
    masked = op_of(made_up[0], backward=False, masked=True)
    assert compute_share(masked, H200) == constants().shares.attention_masked
    assert assumption_of(masked) == (
        "attention's time, cudnn kernel, bfloat16, heads of 128 at 2048, with a mask: 22% of the peak, "
        "where ten measured steps with cuDNN need 20% to 33%"
    )
    wide = op_of(made_up[1], backward=False)
    assert compute_share(wide._replace(masked=True), H200) == compute_share(wide, H200)
    assert assumption_of(wide._replace(masked=True)).endswith(
        "with a mask: as measured on h200 with heads of 64 at 2048, without a mask"
    )


def test_a_kernel_far_behind_another_is_told_and_no_other() -> None:
    """PyTorch's efficient kernel at heads of 256 is; none of ours, cuDNN's or flash's is."""
    for kernel, dtype, head, seq in (
        ("plain", "bf16", 256, 8192), ("efficient", "fp32", 128, 2048), ("efficient", "bf16", 256, 8192),
        ("gluon", "bf16", 128, 8192), ("flash", "bf16", 128, 8192), ("cudnn", "bf16", 64, 1024),
    ):  # fmt: skip
        ops = [op_of(rate_of(kernel, dtype, head, seq), backward=backward) for backward in (False, True)]
        ledger = Ledger(segments=[Segment("steady", "forward")], ops=ops)
        lines = attention_time.far_behind(ledger, H200)
        fastest = rate_of("efficient" if dtype == "fp32" else "gluon", dtype, head, seq)
        times = rate_of(kernel, dtype, head, seq).seconds_of_an_element / fastest.seconds_of_an_element
        assert len(lines) == (times > 3)
        for line in lines:
            assert f"heads of {head} takes about {times:.0f} times as long by the {kernel} kernel" in line
            assert line.endswith("as by gluon, as measured on h200: use attention: triton")
        masked = [op._replace(masked=True) for op in ops]
        assert not attention_time.far_behind(Ledger(segments=ledger.segments, ops=masked), H200)


def test_a_recipe_that_names_a_kernel_far_behind_is_warned(made_up: list[AttentionRate]) -> None:
    made_up += [a_rate("plain", "fp32", seconds=17e-3), a_rate("efficient", "fp32")]
    ours, pytorch = (
        heads_of_128(name, precision="fp32", batch=Batch(micro=4, seq=2048)) for name in ("triton", "sdpa")
    )
    (warning,) = [line for line in predict(ours).warnings if "attention" in line]
    assert "17 times as long by the plain kernel as by efficient, as measured on h200" in warning
    assert warning.endswith("use attention: sdpa")
    assert not any("attention" in line for line in predict(pytorch).warnings)


@pytest.mark.parametrize(("kernel", "dtype"), [("cudnn", "bf16"), ("efficient", "fp32")])
def test_a_measured_mask_takes_what_it_took(kernel: str, dtype: str, made_up: list[AttentionRate]) -> None:
    made_up += [
        a_rate(kernel, dtype, 256, seconds=4e-3),
        a_rate(kernel, dtype, 256, masked=True, seconds=9e-3),
    ]
    made_up.append(a_rate(kernel, dtype, 64, masked=True, seconds=8e-3))
    without, with_one, _ = made_up
    for rate in (without, with_one):
        for backward, seconds in ((False, rate.forward), (True, rate.backward)):
            assert alone_s(op_of(rate, backward=backward)) == pytest.approx(seconds)
    assert assumption_of(op_of(with_one, backward=False)).endswith(
        "heads of 256 at 2048, with a mask: as measured on h200 with heads of 256 at 2048"
    )
    assert assumption_of(op_of(with_one, backward=False, head=200)).endswith(
        "heads of 200 at 2048, with a mask: as measured on h200 with heads of 256 at 2048, the nearest "
        "measured"
    )


KINDS = {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("config", "window", "attention", "kernel", "masked"),
    [
        (with_layers("gemma-3-1b", 2) | KINDS, 512, "sdpa", "cudnn", {True, False}),
        (with_layers("phi-3-mini-4k", 2), 2047, "efficient", "efficient", {True}),
    ],
)
def test_layers_with_a_window_are_masked(
    config: dict[str, Any], window: int, attention: str, kernel: str, masked: set[bool]
) -> None:
    """Of Gemma 3 those of one kind. The others, and all where the window is no shorter, use is_causal."""
    for seq, expected in ((window + 65, masked), (window - 63, {False})):
        ops = [
            op
            for op in ledger_of(recipe_of(config, attention=attention, batch=Batch(micro=1, seq=seq))).ops
            if op.kernel
        ]
        for backward in (False, True):
            some = [op for op in ops if ("backward" in op.name) is backward]
            assert {op.kernel for op in some} == {kernel}
            assert {op.masked for op in some} == expected


def heads_of_128(attention: str, layers: int = 4, groups: int = 8, **fields: Any) -> Recipe:
    wanted = {"batch": Batch(micro=1, seq=2048), "recompute": "full", **fields}
    model = with_layers("qwen3-0.6b", layers) | {"num_key_value_heads": groups}
    return recipe_of(model, attention=attention, **wanted)


@pytest.mark.parametrize(("groups", "is_slower"), [(16, True), (8, False)])
def test_in_fp32_ours_is_predicted_to_be_the_slower_with_heads_of_128(groups: int, is_slower: bool) -> None:
    """As measured, with as many key heads; SDPA has no fused kernel for fewer, and writes the scores out."""
    batch = Batch(micro=4, seq=4096)  # Not that of another test: times of a recipe are kept in a process.
    ours, pytorchs = (
        predict(heads_of_128(name, groups=groups, precision="fp32", batch=batch))
        for name in ("triton", "sdpa")
    )
    assert ours.step_s is not None
    assert pytorchs.step_s is not None
    assert (ours.step_s > pytorchs.step_s) is is_slower
    assert any("float32, heads of 128 at 4096: as measured on h200" in line for line in ours.assumptions)


@pytest.mark.parametrize(
    ("gpu_name", "deterministic", "products"),
    [("h200", False, 5), ("h200", True, 7), ("a100-sxm4-80gb", False, 7)],
)
def test_two_passes_execute_seven_products(gpu_name: str, deterministic: bool, products: int) -> None:
    """The device makes scores and their gradient in both passes.

    The mathematics needs four products wherever it runs.
    """
    wanted = heads_of_128("triton", 1, hardware={"gpu": gpu_name})
    ledger = ledger_of(wanted, deterministic=deterministic)
    forward, backward = (
        next(op for op in ledger.ops if op.kernel and ("backward" in op.name) is which) for which in (False,
        True)
    )  # fmt: skip
    assert backward.kernel == ("gluon" if products == 5 else "plain")
    assert backward.causal_flops / forward.causal_flops == products / 2
    assert backward.flops / forward.flops == products / 2
    assert backward.model_flops / forward.model_flops == 4 / 2


def alone_s(op: Op) -> float:
    """Return the seconds of attention by the rates of attention.toml."""
    return least_s(op, H200)[0] / compute_share(op, H200)
