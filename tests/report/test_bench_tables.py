"""Tables, plots and pages of benchmarks say what the rows say."""

from typing import Any

import pytest

from bench_rows import WHERE, result_of
from trainfit.report.bench_merge import merged
from trainfit.report.bench_pages import pages, pivoted
from trainfit.report.bench_plot import AXES, lines_of, plot_of
from trainfit.report.bench_table import aligned, grids
from trainfit.report.flash_goals import goals
from trainfit.spec.bench import BenchRow, Spread
from trainfit.spec.errors import InputError
from trainfit.spec.provenance import new_bench_record


def point(seq: int, name: str) -> dict[str, bool | int | float | str]:
    return {"dtype": "bf16", "heads": 16, "head": 128, "seq": seq, "body": name, "pass": "both"}


ROWS = (
    BenchRow(
        point=point(128, "ours"), status="done", times=Spread.of([2e-3] * 6), numbers={"tflops_per_s": 123.4}
    ),
    BenchRow(point=point(128, "eager"), status="out-of-memory", message="tried 64 GiB"),
    BenchRow(
        point=point(256, "ours"),
        status="impossible",
        message="faster than light",
        times=Spread.of([1e-9] * 6),
    ),
    BenchRow(point=point(256, "eager"), status="throttled", message="software power cap", discarded=9),
)


def test_a_page_has_rates_of_clean_rows_only_and_says_why_of_the_others() -> None:
    text = pages([new_bench_record(result_of(*ROWS))])["flash"].text
    assert "dtype bf16, heads 16, head 128, pass both\n" in text  # What all share is told once.
    assert "| 128 | 123.4 | out-of-memory |" in text
    assert "| 256 | impossible | throttled |" in text
    assert "faster than light" in text
    assert "software power cap" in text
    assert pivoted(ROWS, "body", "tflops_per_s").titles[-2:] == ("ours, TFLOP/s", "eager, TFLOP/s")


def test_memory_before_backward_has_a_table_of_its_own() -> None:
    def row(body: str, which: str, **known: Any) -> BenchRow:
        return BenchRow(point=point(128, body) | {"pass": which}, **known)

    done: dict[str, Any] = {"status": "done", "times": Spread.of([2e-3] * 6)}
    rows = [
        row("ours", "forward", **done, numbers={"before_backward_bytes": 3 * 2**20}), row("ours", "both", **done),
        row("eager", "forward", status="out-of-memory", message="tried 64 GiB"),
        row("eager", "both", status="out-of-memory", message="tried 64 GiB"),
    ]  # fmt: skip
    text = pages([new_bench_record(result_of(*rows, experiment="attention"))])["attention"].text
    table = text.partition("ours, before backward | eager, before backward")[2]
    assert "3.00 MiB | out-of-memory |" in table
    assert table.count("out-of-memory |") == 1


def test_tables_apart_have_columns_of_their_own() -> None:
    one_head = BenchRow(
        point=point(64, "pytorch") | {"heads": 1},
        status="done",
        times=Spread.of([1.0]),
        numbers={"tflops_per_s": 5.0},
    )
    text = pages([new_bench_record(result_of(*ROWS, one_head))])["flash"].text
    assert "heads 16" in text
    assert "ours, TFLOP/s | eager, TFLOP/s |\n" in text
    assert "| pytorch, TFLOP/s |\n" in text


def test_an_impossible_time_is_not_drawn() -> None:
    assert lines_of(result_of(*ROWS), AXES["flash"]) == {"ours": [(128, 123.4)]}
    assert plot_of(result_of(*ROWS[1:])) is None


def test_the_newest_full_record_of_a_point_makes_the_page() -> None:
    throttled = BenchRow(point=ROWS[0].point, status="throttled", message="software power cap")
    old, new = (new_bench_record(result_of(row)) for row in (throttled, ROWS[0]))
    text = pages([new, old])["flash"].text
    assert "123.4" in text
    assert "throttled" not in text
    tiny = new_bench_record(result_of(*ROWS).model_copy(update={"form": "tiny"}))
    with pytest.raises(InputError, match="full form"):
        pages([tiny])


def test_held_clocks_and_want_of_time_hide_no_number_and_failures_do() -> None:
    """A later run under held clocks says nothing of the code; one that is out of memory does."""
    done, at = ROWS[0], ROWS[0].point
    for status, shown in (
        ("not-run", done.status),
        ("throttled", done.status),
        ("out-of-memory", "out-of-memory"),
    ):
        later = BenchRow(point=at, status=status, message="told")
        (one,) = merged([new_bench_record(result_of(row)) for row in (done, later)])
        assert [row.status for row in one.result.rows] == [shown]


def test_a_series_that_lost_its_first_step_has_no_number_without_warm_up() -> None:
    """Steps were thrown away for held clocks, so the series of 0 and of 1 warm-up steps are the same ten."""

    def series(warm_up: int, *seconds: float) -> BenchRow:
        return BenchRow(
            point={"model": "xl", "warm-up": warm_up}, status="done", times=Spread.of(list(seconds))
        )

    rows = (series(0, 1e-3, 2e-3), series(1, 1e-3, 2e-3), series(2, 1e-3, 2e-3))
    (one,) = merged([new_bench_record(result_of(*rows, experiment="transformer"))])
    assert [row.status for row in one.result.rows] == ["throttled", "done", "done"]
    assert one.result.rows[0].times is None
    slow = (series(0, 9.0, 1e-3), *rows[1:])
    (one,) = merged([new_bench_record(result_of(*slow, experiment="transformer"))])
    assert [row.status for row in one.result.rows] == ["done"] * 3


def test_records_of_one_experiment_make_one_page_and_keep_what_is_known() -> None:
    slower = ROWS[0].model_copy(update={"numbers": {"tflops_per_s": 99.5}})
    lost = BenchRow(point=point(128, "ours"), status="not-run", message="no time")
    part = BenchRow(
        point={key: cell for key, cell in point(128, "ours").items() if key != "pass"}, status="throttled",
        message="held",
    )  # fmt: skip
    records = [
        new_bench_record(result_of(*rows)) for rows in ((part, ROWS[0], ROWS[3]), (slower,), (lost, ROWS[1]))
    ]
    (one,) = merged(list(reversed(records)))
    # The newest with a number, nothing of the part, and what is new after what it follows in its record.
    assert one.result.rows == (slower, ROWS[1], ROWS[3])
    assert len(one.records) == 3
    assert "3 records, commit" in pages(records)["flash"].text
    other = result_of(lost).model_copy(update={"environment": WHERE.model_copy(update={"torch": "9.9"})})
    (newest,) = merged([*records, new_bench_record(other)])
    assert newest.result.rows == (lost,)  # Times of another torch are not mixed in.


def test_a_table_tells_once_what_all_rows_share() -> None:
    (grid,) = grids(ROWS)
    assert grid.same == "dtype bf16, heads 16, head 128, pass both"
    assert grid.titles[:2] == ("seq", "body")
    assert aligned(grid)[1].split() == ["128", "ours", "2", "ms", "0%", "6", "123.4"]


def test_the_goals_are_the_first_table_of_flash_and_a_lost_row_says_so() -> None:
    def row(body: str, head: int, seq: int, which: str, **known: Any) -> BenchRow:
        at = {
            "dtype": "bf16",
            "batch": 1,
            "heads": 16,
            "causal": True,
            "head": head,
            "seq": seq,
            "pass": which,
        }
        return BenchRow(point={**at, "body": body}, **known)

    done: dict[str, Any] = {"status": "done", "times": Spread.of([4.357e-3] * 6)}
    rows = [
        row("cudnn", 128, 8192, "forward", **done, numbers={"tflops_per_s": 530.4}),
        row("ours", 128, 8192, "forward", **done, numbers={"tflops_per_s": 571.6}),
        row("ours", 64, 16384, "both", **done, numbers={"tflops_per_s": 1.0, "host_s": 3.21e-4}),
        row("ours", 64, 16384, "forward", **done, numbers={"tflops_per_s": 1.0, "host_s": 1.23e-4}),
        row("cudnn", 64, 16384, "both", status="throttled", message="software power cap"),
    ]
    text = pages([new_bench_record(result_of(*rows))])["flash"].text
    tables = [part for part in text.split("\n\n") if part.startswith("| ")]
    assert "| forward, head 128, 8,192 tokens, TFLOP/s | 500 plain, 640 ours | 530 |  | 572 |" in tables[0]
    assert (
        "| forward + backward, head 64, 16,384 tokens, ms | at most 4.4 | throttled |  | 4.36 |" in tables[0]
    )
    assert "backward, head 128" not in tables[0]
    assert "321 us" in text  # The host's time, of both passes only.
    assert "123 us" not in text
    assert goals([]) is None
