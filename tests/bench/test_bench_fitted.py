"""A benchmark's tables in a narrow terminal: nothing wider than it, no number cut or lost."""

import pytest

from trainfit.cli.bench_text import broken, fitted, show, width_of
from trainfit.report.bench_table import Grid, grids
from trainfit.spec.bench import BenchResult, BenchRow, Cell, Environment, Spread

KERNEL = "vectorized_elementwise_kernel CUDAFunctor_add_of_a_template_60"


def row(point: dict[str, Cell], status: str = "done", **numbers: Cell) -> BenchRow:
    times = Spread.of([0.001, 0.002, 0.003])
    return BenchRow.model_validate(
        {
            "point": point, "status": status, "message": "" if status == "done" else "why",
            "times": times, "numbers": numbers,
        }
    )  # fmt: skip


def wide(statuses: tuple[str, ...] = ("done",) * 8) -> Grid:
    """Eight lines with three keys and nine numbers beside the times."""
    rows = [
        row(
            {"model": "m", "precision": precision, "pass": f"{name} of a step", "context": context},
            statuses[index],
            **{f"number_{number}_bytes": 2**20 * (100 * index + number + 1) for number in range(9)},
        )
        for index, (precision, name, context) in enumerate(
            (p, n, c) for p in ("fp32", "amp-bf16") for n in ("forward", "backward") for c in (128, 256)
        )
    ]
    (grid,) = grids(rows)
    return grid


def cells(tables: list[Grid]) -> list[str]:
    return [cell for table in tables for line in table.lines for cell in line[table.num_keys :] if cell]


@pytest.mark.parametrize("width", [60, 78, 98, 118])
def test_a_wide_table_becomes_tables_that_fit_and_keeps_each_number(width: int) -> None:
    grid = wide()
    assert width_of(grid) > 118
    tables = fitted(grid, width)
    assert all(width_of(table) <= width for table in tables)
    shown = cells(tables) + [table.same for table in tables]
    for line in grid.lines:
        for cell in line[grid.num_keys :]:
            assert cell in shown or any(cell in same for same in shown)
    assert sum(cell.endswith("iB") for cell in shown) == 8 * 9
    for table in tables:  # Each line still says which one it is.
        assert len({line[: table.num_keys] for line in table.lines}) == len(table.lines)


def test_a_table_that_fits_is_left_alone() -> None:
    grid = wide()
    assert fitted(grid, width_of(grid)) == [grid]


def test_what_is_the_same_in_all_lines_goes_into_the_heading_and_nothing_is_split() -> None:
    rows = [row({"a": index}, "unsteady", long_number_s=1.0 * index) for index in range(1, 5)]
    (grid,) = grids(rows)
    assert grid.titles[-1] == "status"
    (table,) = fitted(grid, width_of(grid) - 1)
    assert table.same == "median 2 ms, spread 100%, samples 3, status unsteady"
    assert table.titles == ("a", "long number")


def test_how_a_line_ended_stands_in_the_first_table() -> None:
    tables = fitted(wide(("unsteady", *("done",) * 7)), 78)
    assert len(tables) > 1
    assert "status" in tables[0].titles
    assert not any("status" in table.titles for table in tables[1:])


def test_a_line_without_any_number_is_shown_once() -> None:
    lines = (("a", *("123456789",) * 4), ("b", "", "", "", ""))
    grid = Grid(("key", "one", "two", "three", "four"), lines, (False, *(True,) * 4), "")
    tables = fitted(grid, 30)
    assert len(tables) == 2
    assert [len(table.lines) for table in tables] == [2, 1]


def test_keys_go_into_headings_and_long_names_over_lines() -> None:
    rows = [
        row(
            {"precision": p, "top of": t, "operation": f"op{i}", "kernel": f"{KERNEL}{i}"},
            total_s=1e-3 * i + 1e-3,
        )
        for p in ("fp32", "bf16")
        for t in ("forward", "backward")
        for i in range(5)
    ]
    (grid,) = grids(rows)
    tables = fitted(grid, 50)
    assert all(width_of(table) <= 50 for table in tables)
    assert {table.same.rpartition("precision ")[2].partition(",")[0] for table in tables} == {"fp32", "bf16"}
    names = [cell.replace("\n", "") for table in tables for line in table.lines for cell in line]
    assert all(
        sum(name == f"{KERNEL}{i}".replace(" ", "") or name == f"{KERNEL}{i}" for name in names) == 4
        for i in range(5)
    )
    assert any("\n" in cell for table in tables for line in table.lines for cell in line)


def test_broken_names_lose_no_letter() -> None:
    text = broken(KERNEL, 24)
    assert max(map(len, text.splitlines())) <= 24
    assert text.replace("\n", "").replace(" ", "") == KERNEL.replace(" ", "")
    assert broken("trainfit/models/native/decoder.py:195", 24) == "trainfit/models/native/\ndecoder.py:195"
    assert broken("nothing_to_break_at_xxxxxxxxxxxxxxxxxxxxxxxxx", 10).endswith("\nxxxxxxxxxxxxxxxxxxxxxxxxx")


def result(name: str, rows: list[BenchRow]) -> BenchResult:
    where = Environment(device="a CPU", device_bytes=1, platform="x", torch="2", python="3")
    return BenchResult(
        experiment=name, form="tiny", environment=where, limit_s=9.0, elapsed_s=1.0, rows=tuple(rows)
    )


@pytest.mark.parametrize("width", [80, 100])
def test_what_is_printed_fits_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [
        row(
            {"precision": p, "pass": n},
            "unsteady",
            busy_s=0.1,
            **{f"a_long_name_{i}_s": 0.1 * i for i in range(12)},
        )
        for p in ("fp32", "bf16")
        for n in ("forward", "backward")
    ]
    failed = BenchRow(
        point={"precision": "fp16", "pass": "forward"}, status="not-run", message="no time was left"
    )
    show(result("kernels", [*rows, failed]))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width
    assert "Rows without a result" in printed
    assert "no time was left" in printed
    assert "unsteady: the time cap came before" in printed
    assert "busy: sum of the kernels' times" in printed
    assert "busy share" not in printed
