"""What the pages of experiments say at their top comes from the rows, and nothing is said where rows are missing."""

from typing import Any

import pytest

from trainfit.report import bench_said, bench_said_attention, bench_said_device
from trainfit.report.bench_prose import stories
from trainfit.report.bench_step_tables import milliseconds, of_streams, verdict
from trainfit.report.bench_table import Grid
from trainfit.spec.bench import BenchRow, Cell, Curve, Spread
from trainfit.spec.units import GIB


def row(
    point: dict[str, Cell], seconds: float | None = None, status: Any = "done", **numbers: Cell
) -> BenchRow:
    times = None if seconds is None else Spread.of([seconds * (1 + 0.01 * share) for share in range(-3, 4)])
    message = "" if status in ("done", "unsteady") else "why"
    return BenchRow(point=point, status=status, message=message, times=times, numbers=numbers)


def step(
    model: str, precision: str, mode: str, seconds: float | None, status: Any = "done", **more: Any
) -> BenchRow:
    warm_up = more.pop("warm_up", 5)
    point: dict[str, Cell] = {"model": model, "precision": precision, "compile": mode, "warm-up": warm_up}
    return row(point, seconds, status, **more)


def test_nothing_is_said_without_rows() -> None:
    for story in stories().values():
        assert story.said([]) == []
        assert all(claim.measured([]) == "" for claim in story.claims)


def test_a_step_is_faster_in_fewer_bits_and_compiled_by_what_is_steady() -> None:
    rows = [
        step("small", "fp32", "false", 0.040), step("small", "bf16", "false", 0.020), step("small", "bf16", "block", 0.010),
        step("2.7b", "fp32", "false", 0.900), step("2.7b", "bf16", "false", 0.100), step("2.7b", "bf16", "block", 0.125),
        step("large", "fp32", "false", 0.300), step("large", "bf16", "false", 0.001, "unsteady"),
        step("xl", "bf16", "model", None, "throttled"),
    ]  # fmt: skip
    assert bench_said.of_transformer(rows) == [
        "Eager, a whole step in bf16 is 2.00 (small) to 9.00 (2.7b) times as fast as in fp32.",
        "Compiled (blocks), a step is 0.80 (2.7b, bf16) to 2.00 (small, bf16) times as fast as eager, of 2 pairs that are both steady, "
        "slower in 1.",
    ]


def test_what_steps_without_warm_up_cost_is_in_their_mean() -> None:
    rows = [
        step("small", "bf16", "block", 0.01, warm_up=warm_up, total_mean_s=mean)
        for warm_up, mean in ((0, 0.5), (5, 0.02))
    ]
    assert bench_said.of_warm_up(rows).startswith(
        "the mean of ten steps without warm-up over that after five: blocks 25.00 (small, bf16)."
    )


def test_activations_are_a_share_of_the_highest_point() -> None:
    point: dict[str, Cell] = {
        "attention": "sdpa", "context": 2048, "precision": "fp32", "pass": "whole step", "source": "measured",
    }  # fmt: skip
    columns = {"weights": (10, 10, 10), "activations": (0, 30, 5)}
    curve = Curve(phases=("forward", "backward", "optimizer"), columns=columns)
    measured = row(point, peak_bytes=2 * GIB).model_copy(update={"curve": curve})
    predicted = row(point | {"source": "predicted"}, error="+0.12%", off_by="+5 bytes", fits=True)
    assert bench_said.of_memory([measured, predicted]) == [
        "Context 2,048, sdpa attention, fp32: a whole step's peak is 2.00 GiB, 75% of it activations.",
        "The predicted peak is the measured one to the byte in 0 of 1 runs, at worst off by +0.12%.",
    ]


def test_phases_are_compared_each_and_the_furthest_is_named() -> None:
    point: dict[str, Cell] = {
        "context": 128, "attention": "eager", "precision": "fp32", "pass": "whole step", "source": "measured",
    }  # fmt: skip
    measured = row(point, forward_bytes=2048, backward_bytes=4096, optimizer_bytes=512)
    told: dict[str, Cell] = {**point, "source": "predicted"}
    others: dict[str, Cell] = {
        "error": "0%", "off_by": bench_said.EXACT, "backward_bytes": 4096, "optimizer_bytes": 512,
    }  # fmt: skip
    right, wrong = (row(told, **others, forward_bytes=num_bytes) for num_bytes in (2048, 1024))
    assert (
        bench_said.of_memory([measured, right])[-1] == "Phase by phase, 3 of 3 are as measured to the byte."
    )
    assert bench_said.of_memory([measured, wrong])[-1] == (
        "Phase by phase, 2 of 3 are as measured to the byte; the furthest is off by -1,024 bytes (forward of eager, 128, fp32, whole step)."
    )


def test_what_was_out_of_memory_was_foretold_or_not() -> None:
    point: dict[str, Cell] = {"context": 2048, "pass": "whole step", "source": "measured"}
    failed = row(point, status="out-of-memory")
    predicted = [row(point | {"source": "predicted"}, fits=fits) for fits in (True, False)]
    assert bench_said.of_memory([failed, predicted[0]]) == [
        "1 runs were out of memory; the prediction says so of 0 of them."
    ]
    assert bench_said.of_memory([failed, predicted[1]]) == [
        "1 runs were out of memory; the prediction says so of 1 of them."
    ]


def test_a_step_is_told_by_its_largest_parts_and_how_long_the_device_works() -> None:
    at: dict[str, Cell] = {"model": "xl", "precision": "fp32", "context": 512}
    shares = {f"part_{index}_share": 0.1 * index for index in range(1, 6)}
    small: dict[str, Cell] = {**at, "model": "small", "profiled": "whole step"}
    rows = [
        row({**at, "profiled": "whole step"}, **shares),
        row(small, part_1_share=1.0),
        row({**at, "pass": "whole step"}, busy_share=0.996),
        row({**at, "context": 128, "pass": "whole step"}, busy_share=0.127),
    ]
    assert bench_said.of_kernels(rows) == [
        "Of a whole step of xl in fp32 at a context of 512 most is part 5 50.0%, part 4 40.0%, part 3 30.0%, part 2 20.0%.",
        "The device works 12.7% (xl, fp32, context 128) to 99.6% (xl, fp32, context 512) of a whole step's time; the rest it waits for "
        "the host.",
    ]


def test_an_optimizers_share_grows_past_a_tenth() -> None:
    def of(model: str, share: float) -> BenchRow:
        point: dict[str, Cell] = {
            "model": model,
            "precision": "amp-bf16",
            "context": 512,
            "profiled": "whole step",
        }
        return row(point, optimizer_share=share, MLP_share=0.5, loss_share=0.02)

    said = bench_said.of_small_shares([of("small", 0.081), of("large", 0.112), of("xl", 0.122)])
    assert (
        "less than 10% in each of 3 cases are loss (at most 2.0%); not so optimizer (at most 12.2%), MLP (at most 50.0%)"
        in said
    )
    assert "the optimizer takes 8.1% of small, 11.2% of large, 12.2% of xl" in said


def attention(body: str, seq: int, seconds: float, **more: Any) -> BenchRow:
    point: dict[str, Cell] = {
        "dtype": "bf16", "heads": more.pop("heads", 16), "head": more.pop("head", 64), "seq": seq, "body": body,
        "pass": more.pop("which", "both"),
    }  # fmt: skip
    return row(point, seconds, **more)


def test_flash_is_told_at_long_lengths_and_who_is_fastest() -> None:
    rows = [
        attention("ours", 8192, 1e-3, tflops_per_s=494.4), attention("cudnn", 8192, 2e-3, tflops_per_s=388.0),
        attention("ours", 1024, 2e-3, tflops_per_s=1.0), attention("cudnn", 1024, 1e-3, tflops_per_s=2.0),
        attention("ours", 512, 1e-3, heads=1), attention("pytorch", 512, 2e-3, heads=1), attention("ours", 2048, 1e-3, heads=1),
    ]  # fmt: skip
    assert bench_said_attention.of_flash(rows) == [
        "Head size 64, forward and backward, TFLOP/s: ours 494, cuDNN 388 at 8,192.",
        "Of 2 shapes ours is the fastest at 1, cuDNN at 1,024 tokens of head 64.",
        "One head of 64 in bf16, 512 tokens, forward and backward: ours 1 ms, PyTorch's choice 2 ms.",
    ]


def test_a_clock_that_does_not_wait_is_told_beside_one_that_does() -> None:
    hasty = attention("eager", 16384, 1e-4, which="forward, not synchronised", status="impossible")
    right = attention("eager", 16384, 2e-2, which="forward", host_s=5e-4)
    assert bench_said_attention.of_waiting([hasty, right]) == (
        "16,384 tokens of head size 64 in bf16, without waiting: written out 100 us instead of 20 ms (200 times as long)."
    )
    assert bench_said_attention.of_asking([right]) == (
        "a forward of 16,384 tokens, head size 64: written out in bf16 20 ms on the device, 500 us to ask."
    )
    assert bench_said_attention.of_waiting([right]) == ""


def streams(case: str, one: float, two: float, **numbers: Cell) -> list[BenchRow]:
    return [row({"case": case, "streams": "one"}, one), row({"case": case, "streams": "two"}, two, **numbers)]


@pytest.mark.parametrize(
    ("one", "two", "gain", "said"),
    [
        (2.0, 1.0, 2.0, "faster"),
        (2.0, 1.98, 1.01, "no difference beyond the spread"),
        (1.0, 2.0, 0.5, "slower"),
        (2.1, 1.0, 2.1, "all there is; 5.0% above the bound is noise"),
    ],
)
def test_a_gain_is_held_against_the_spread_and_its_bound(
    one: float, two: float, gain: float, said: str
) -> None:
    assert verdict(*streams("copies", one, two, gain=gain, at_most=2.0)) == said


def test_streams_stand_side_by_side_and_say_which_gained() -> None:
    rows = streams("copies", 2.0, 1.0, gain=2.0, at_most=2.0) + streams("products", 2.0, 1.98, gain=1.01)
    lost = [row({"case": "lost", "streams": name}, status="failed") for name in ("one", "two")]
    assert bench_said_device.of_streams([*rows, *lost]) == [
        "A second stream helped: copies (2.00 times).",
        "No difference beyond the spread: products.",
    ]
    (table,) = of_streams([*rows, *lost])
    assert isinstance(table, Grid)
    assert table.lines[0] == ("copies", "2 s ± 2%", "1 s ± 2%", "2.00", "2.00", "faster")
    assert table.lines[2] == ("lost", "failed", "failed", "", "", "")


def test_a_device_is_told_by_its_best_rates() -> None:
    rows = [
        row({"level": "L2", "set_kib": 1}, gb_per_s=5000.0), row({"level": "L2", "set_kib": 2}, gb_per_s=4000.0),
        row({"level": "L1", "set_kib": 2}, status="refused"), row({"dtype": "bf16", "size": 2}, tflops_per_s=700.0, of_data_sheet=0.708),
        row({"dtype": "bf16", "size": 4}, status="throttled"),
    ]  # fmt: skip
    assert bench_said_device.of_gpu(rows) == [
        "Reads, GB/s: L2 5,000.",
        "Matrix products of random data, TFLOP/s: bf16 700 (71% of the data sheet).",
    ]


def test_milliseconds_have_three_digits() -> None:
    assert [milliseconds(s) for s in (1.3106, 0.0451, 0.00451, 0.000198)] == [
        "1,311",
        "45.1",
        "4.51",
        "0.198",
    ]


def test_rates_with_a_mask_are_told_apart_from_the_course_s_table() -> None:
    def masked(body: str, rate: float, mask: str = "additive", seq: int = 8192) -> BenchRow:
        point = {
            "dtype": "bf16",
            "heads": 16,
            "head": 64,
            "mask": mask,
            "seq": seq,
            "body": body,
            "pass": "both",
        }
        return BenchRow(
            point=point, status="done", times=Spread.of([1.0]), numbers={"tflops_per_s": rate, "host_s": 1.0}
        )

    rows = [
        masked("cudnn", 300.4),
        masked("efficient", 150.0),
        masked("cudnn", 1.0, seq=1024),
        masked("ours", 2.0, "none"),
    ]
    assert bench_said_attention.of_attention(rows) == [
        "With an additive mask in bf16, forward and backward, TFLOP/s: cuDNN 300, efficient 150 with heads of 64 at 8,192."
    ]
    assert bench_said_attention.of_asking_for_both(rows) == ""


def test_sustained_rates_are_told_with_clocks_and_power() -> None:
    def layers(kind: str, rate: float, product: str = "all", **numbers: float) -> BenchRow:
        point: dict[str, Cell] = {"sustained": kind, "tokens": 16384, "product": product}
        return BenchRow(
            point=point, status="done", times=Spread.of([1.0]), numbers={"tflops_per_s": rate, **numbers}
        )

    rows = [
        layers("bf16", 667.0, of_data_sheet=0.674, sm_mhz=1440.0, watts=699.0),
        layers("bf16", 677.0, of_data_sheet=0.685, sm_mhz=1500.0, watts=700.0),
        layers("bf16", 900.0, "forward"),
        layers("fp8", 1100.0),
    ]
    assert bench_said_device.of_gpu(rows) == [
        "Layers of 8B without a pause, TFLOP/s: bf16 667 to 677 (67% to 68% of the data sheet) at 1440 to 1500 MHz and 700 W; fp8 1,100 to 1,100."
    ]
