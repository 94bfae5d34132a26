"""Tables and plots of benchmarks show the rows by the declared columns and plots."""

from bench_rows import result_of
from trainfit.bench.experiments import flash, transformer
from trainfit.bench.harness.experiment import Column, Plot
from trainfit.report.bench_plot import panels_of, plot_of
from trainfit.report.bench_table import grids, notes, reasons
from trainfit.spec.bench import BenchRow, Cell, Spread


def point(seq: int, body: str) -> dict[str, Cell]:
    return {"dtype": "bf16", "heads": 16, "head": 128, "seq": seq, "body": body, "pass": "both"}


TIMES = Spread.of([2e-3] * 6)
ROWS = (
    BenchRow(point=point(128, "ours"), status="done", times=TIMES, numbers={"tflops_per_s": 123.4}),
    BenchRow(
        point=point(128, "eager"), status="out-of-memory", message="64 GiB. Including non-PyTorch memory"
    ),
    BenchRow(point=point(256, "ours"), status="impossible", message="why", times=Spread.of([1e-9] * 6)),
    BenchRow(point=point(256, "eager"), status="throttled", message="power cap", discarded=9),
)


def test_a_table_has_shared_keys_in_its_heading_and_declared_columns() -> None:
    columns = (Column("seq", "tokens"), Column("tflops_per_s", "TFLOP/s", ".0f", note="of seven products"))
    (grid,) = grids(ROWS, columns)
    assert grid.same == "dtype bf16, heads 16, head 128, pass both"
    assert grid.titles == ("tokens", "body", "median", "spread", "samples", "TFLOP/s", "status")
    assert grid.lines[0] == ("128", "ours", "2 ms", "0%", "6", "123", "")
    assert notes(ROWS, columns)[-1] == "TFLOP/s: of seven products"
    assert reasons(ROWS)[0].startswith("out-of-memory: 64 GiB. (dtype bf16")


def test_a_number_is_formatted_by_its_unit_and_printed_with_its_deviation() -> None:
    numbers: dict[str, Cell] = {
        "a_bytes": 2**20, "b_s": 0.5, "c_share": 0.25, "d_mean_s": 1.0, "d_std_s": 0.1, "e": True,
    }  # fmt: skip
    (grid,) = grids(
        [BenchRow(point={"n": 1}, status="done", numbers=numbers)],
        [Column("d_mean_s", "d", deviation="d_std_s")],
    )
    assert grid.titles == ("n", "d", "a", "b", "c", "e")
    assert grid.lines == [("1", "1 s ± 100 ms", "1.00 MiB", "500 ms", "25.0%", "yes")]


def test_an_impossible_time_is_not_drawn() -> None:
    (panel,) = panels_of(ROWS, flash.EXPERIMENT.plots[0])
    assert panel.title == "head size 128"
    (line,) = (one for one in panel.series if one.label == "trainfit")
    assert (line.x, line.y) == ([128.0, 256.0], [123.4, None])
    assert plot_of(result_of(*ROWS[1:]), flash.EXPERIMENT.plots) is None


def test_panels_and_series_keep_the_declared_order_and_scale() -> None:
    def step(model: str, mode: str, seconds: float | None) -> BenchRow:
        at: dict[str, Cell] = {"model": model, "precision": "bf16", "compile": mode, "warm-up": 5}
        if seconds is None:
            return BenchRow(point=at, status="not-run", message="no time")
        return BenchRow(point=at, status="done", times=Spread.of([seconds] * 10))

    rows = [step("xl", "false", None), *(step("small", mode, 0.1) for mode in ("model", "false", "block"))]
    panels = panels_of(rows, transformer.EXPERIMENT.plots[0])
    assert [panel.title for panel in panels] == ["eager", "compiled: blocks", "compiled: whole model"]
    (series,) = panels[0].series
    assert (series.label, series.x, series.y) == ("bf16", ["small", "xl"], [100.0, None])


def test_bars_have_their_bound_and_a_text_where_there_is_no_value() -> None:
    plot = Plot(
        x=("case",), y="gain", bound="at_most", bound_label="at most", is_bar=True, text=".2f", title="t"
    )
    rows = [
        BenchRow(point={"case": "a"}, status="done", numbers={"gain": 1.5, "at_most": 2.0}),
        BenchRow(point={"case": "b"}, status="failed", message="why"),
    ]
    (panel,) = panels_of(rows, plot)
    bars, bound = panel.series
    assert (bars.y, bars.text) == ([1.5, None], ["1.50", "failed"])
    assert (bound.marker, bound.y) == ("|", [2.0, None])


def test_several_numbers_are_stacked_in_one_bar() -> None:
    plot = Plot(x=("model",), y=("a_share", "b_share"), is_bar=True, scale=100.0, title="t")
    (panel,) = panels_of(
        [BenchRow(point={"model": "m"}, status="done", numbers={"a_share": 0.4, "b_share": 0.6})], plot
    )
    assert [(one.label, one.y, one.stack) for one in panel.series] == [
        ("a", [40.0], "all"),
        ("b", [60.0], "all"),
    ]
    assert panel.series[0].color != panel.series[1].color
