"""A benchmark's tables in a narrow terminal: nothing wider than it, no number cut or lost."""

from itertools import product

import pytest

from bench_rows import result_of
from trainfit.cli.text.bench import BREAKS, broken, fitted, show, width_of
from trainfit.report.bench_table import Cells, Grid, grids
from trainfit.spec.bench import BenchRow, Cell, Spread

KERNEL = "vectorized_elementwise_kernel CUDAFunctor_add_of_a_template_60"


def row(point: dict[str, Cell], status: str = "done", **numbers: Cell) -> BenchRow:
    known = {"point": point, "status": status, "message": "" if status == "done" else "why"}
    return BenchRow.model_validate(known | {"times": Spread.of([0.001, 0.002, 0.003]), "numbers": numbers})


def wide(*statuses: str) -> Grid:
    """Eight lines with three keys and nine numbers after the times; all others are done."""
    rows = []
    for index, (precision, name, context) in enumerate(
        product(("fp32", "amp-bf16"), ("forward", "backward"), (128, 256))
    ):
        point = {"model": "m", "precision": precision, "pass": f"{name} of a step", "context": context}
        sizes = {f"number_{number}_bytes": 2**20 * (100 * index + number + 1) for number in range(9)}
        rows.append(row(point, [*statuses, *("done",) * 8][index], **sizes))
    (grid,) = grids(rows)
    return grid


def cells(tables: list[Grid]) -> list[str]:
    return [cell for table in tables for line in table.lines for cell in line[table.num_keys :] if cell]


@pytest.mark.parametrize("width", [60, 98])
def test_a_wide_table_becomes_tables_that_fit_and_keeps_each_number(width: int) -> None:
    grid = wide()
    assert fitted(grid, width_of(grid)) == [grid]
    tables = fitted(grid, width)
    assert all(width_of(table) <= width for table in tables)
    shown = cells(tables) + [table.same for table in tables]
    for line in grid.lines:
        for cell in line[grid.num_keys :]:
            assert cell in shown or any(cell in same for same in shown)
    assert sum(cell.endswith("iB") for cell in shown) == 8 * 9
    for table in tables:  # Each line still says which one it is.
        assert len({line[: table.num_keys] for line in table.lines}) == len(table.lines)


def test_what_is_the_same_in_all_lines_goes_into_the_heading_and_nothing_is_split() -> None:
    rows = [row({"a": index}, "unsteady", long_number_s=1.0 * index) for index in range(1, 5)]
    (grid,) = grids(rows)
    assert grid.titles[-1] == "status"
    (table,) = fitted(grid, width_of(grid) - 1)
    assert table.same == "median 2 ms, spread 100%, samples 3, status unsteady"
    assert table.titles == ("a", "long number")


def test_how_a_line_ended_stands_in_the_first_table() -> None:
    tables = fitted(wide("unsteady"), 78)
    assert len(tables) > 1
    assert "status" in tables[0].titles
    assert not any("status" in table.titles for table in tables[1:])


def test_a_line_without_any_number_is_shown_once() -> None:
    lines = (("a", *("123456789",) * 4), ("b", "", "", "", ""))
    titles = ("key", "one", "two", "three", "four")
    columns = zip(titles, (False, *(True,) * 4), zip(*lines, strict=True), strict=True)
    grid = Grid([Cells(*column) for column in columns], "")
    tables = fitted(grid, 30)
    assert len(tables) == 2
    assert [len(table.lines) for table in tables] == [2, 1]


def test_keys_go_into_headings_and_long_names_over_lines() -> None:
    rows = [
        row({"precision": p, "top of": t, "operation": f"op{i}", "kernel": f"{KERNEL}{i}"}, total_s=1e-3 * i)
        for p, t, i in product(("fp32", "bf16"), ("forward", "backward"), range(5))
    ]
    (grid,) = grids(rows)
    tables = fitted(grid, 50)
    assert all(width_of(table) <= 50 for table in tables)
    assert {table.same.rpartition("precision ")[2].partition(",")[0] for table in tables} == {"fp32", "bf16"}
    names = [cell.replace("\n", "").replace(" ", "") for one in tables for line in one.lines for cell in line]
    assert all(names.count(f"{KERNEL}{i}".replace(" ", "")) == 4 for i in range(5))
    assert any("\n" in cell for table in tables for line in table.lines for cell in line)


def test_broken_names_lose_no_letter() -> None:
    text = broken(KERNEL, 24, BREAKS)
    assert max(map(len, text.splitlines())) <= 24
    assert text.replace("\n", "").replace(" ", "") == KERNEL.replace(" ", "")
    assert (
        broken("trainfit/models/native/decoder.py:195", 24, BREAKS)
        == "trainfit/models/native/\ndecoder.py:195"
    )
    assert broken("nothing_to_break_at_xxxxxxxxxxxxxxxxxxxxxxxxx", 10, BREAKS).endswith(
        "\nxxxxxxxxxxxxxxxxxxxxxxxxx"
    )


def test_what_is_printed_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    numbers = {f"a_long_name_{i}_s": 0.1 * i for i in range(12)}
    rows = [
        row({"precision": p, "pass": n}, "unsteady", busy_s=0.1, **numbers)
        for p, n in product(("fp32", "bf16"), ("forward", "backward"))
    ]
    at: dict[str, Cell] = {"precision": "fp16", "pass": "forward"}
    failed = BenchRow(point=at, status="not-run", message="no time was left")
    show(result_of(*rows, failed, experiment="kernels"))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    for part in ("Rows without a result", "no time was left", "unsteady: the time cap was reached"):
        assert part in printed
    assert "busy: sum of the kernels' times" in printed
    assert "busy share" not in printed
