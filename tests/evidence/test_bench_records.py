"""Records of one experiment are merged whole and in order, however they come."""

from typing import Any

from evidence.scripts.bench_records import merged
from trainfit.spec.bench import BenchResult, BenchRow, Cell, Environment, Spread
from trainfit.spec.provenance import new_bench_record
from trainfit.spec.result import Record


def record(experiment: str, rows: list[BenchRow], day: int, torch: str = "2.11.0") -> Record:
    where = Environment(device="a GPU", device_bytes=1, torch=torch, python="3.11", platform="linux")
    result = BenchResult(
        experiment=experiment, form="full", rows=tuple(rows), environment=where, limit_s=1.0, elapsed_s=1.0
    )
    return new_bench_record(result).model_copy(update={"created_at": f"2026-11-{day:02}T00:00:00+00:00"})


def row(point: dict[str, Cell], seconds: float | None, **numbers: Any) -> BenchRow:
    if seconds is None:
        return BenchRow(point=point, status="not-run", message="no time")
    return BenchRow(point=point, status="done", times=Spread.of([seconds] * 10), numbers=numbers)


A, B, C, D = ({"method": name} for name in "abcd")


def test_rows_keep_the_experiments_order_however_the_records_came() -> None:
    first = record("accumulation", [row(A, 1.0), row(B, None), row(D, 1.0)], 1)
    second = record("accumulation", [row(B, 2.0), row(C, 2.0), row(D, None)], 2)
    for records in ([first, second], [second, first]):
        (one,) = merged(records)
        assert [(row.point["method"], row.status) for row in one.result.rows] == [(x, "done") for x in "abcd"]
        assert len(one.records) == 2


def test_throttling_and_lack_of_time_hide_no_number_and_failures_do() -> None:
    for status, shown in (("not-run", "done"), ("throttled", "done"), ("out-of-memory", "out-of-memory")):
        later = BenchRow(point=A, status=status, message="why")  # pyright: ignore[reportArgumentType]
        (one,) = merged([record("flash", [row(A, 1.0)], 1), record("flash", [later], 2)])
        assert [row.status for row in one.result.rows] == [shown]


def test_the_failure_of_a_point_without_all_keys_is_left_out_once_a_row_has_them() -> None:
    part = BenchRow(point=A, status="throttled", message="why")
    whole = row({**A, "pass": "both"}, 1.0)
    (one,) = merged([record("flash", [part, whole], 1)])
    assert one.result.rows == (whole,)


def test_times_of_another_torch_and_of_tiny_form_are_not_merged() -> None:
    old, new = record("flash", [row(A, 1.0)], 1), record("flash", [row(B, 1.0)], 2, torch="9.9")
    (one,) = merged([old, new])
    assert [row.point for row in one.result.rows] == [B]
    assert old.bench is not None
    tiny = old.model_copy(update={"bench": old.bench.model_copy(update={"form": "tiny"})})
    assert merged([tiny]) == []


def test_a_list_of_findings_comes_from_one_record() -> None:
    def top(kernel: str, model: str) -> BenchRow:
        return row({"model": model, "top of": "forward", "operation": "mm", "kernel": kernel}, 1.0)

    old = record("kernels", [top("old", "small"), top("older", "small"), top("kept", "xl")], 1)
    new = record("kernels", [top("new", "small")], 2)
    (one,) = merged([old, new])
    assert {row.point["kernel"] for row in one.result.rows} == {"new", "kept"}


def test_a_series_that_lost_its_first_step_has_no_number_without_warm_up() -> None:
    """The series of 0 and of 1 warm-up steps are then the same ten steps."""

    def series(warm_up: int, *seconds: float) -> BenchRow:
        times = Spread.of(list(seconds))
        return BenchRow(point={"model": "xl", "warm-up": warm_up}, status="done", times=times)

    rows = [series(0, 1e-3, 2e-3), series(1, 1e-3, 2e-3), series(2, 1e-3, 2e-3)]
    (one,) = merged([record("transformer", rows, 1)])
    assert [row.status for row in one.result.rows] == ["throttled", "done", "done"]
    (one,) = merged([record("transformer", [series(0, 9.0, 1e-3), *rows[1:]], 1)])
    assert [row.status for row in one.result.rows] == ["done"] * 3
