"""Figures in the sentences of the pages on precision, layer norms and autocast are those of the records."""

import math
from functools import cache

import pytest

from evidence.scripts.tables import bench, precision
from evidence.scripts.tables.joined import records
from page_claims import check
from trainfit.bench.workloads.autocast_list import OPERATIONS
from trainfit.report.plot import Panel
from trainfit.spec.bench import Cell
from trainfit.spec.result import Outcome, Record

PRECISION, LAYER_NORM = "evidence/pages/precision.md", "evidence/pages/layer-norm.md"


newest = cache(bench.newest)


def number(experiment: str, name: str, **point: Cell) -> float:
    found = newest(experiment, next(iter(point)), needs_gpu=False)
    assert found is not None
    (row,) = bench.having(found.rows, point)
    return float(row.numbers[name])


def kept(dtype: str, lr: float) -> float:
    return 100 * number("rounding", "kept_share", quantity="update of weights", dtype=dtype, lr=lr)


def test_what_reaches_the_weights() -> None:
    figures = kept("bf16", 1e-4), kept("fp16", 1e-4), kept("bf16", 1e-5), kept("fp16", 1e-5)
    pattern = r"# % of the update reaches bf16 weights and # % fp16 weights; at 1e-5, # % and # %"
    check(PRECISION, pattern, figures)
    for lr in (1e-3, 1e-4, 1e-5, 1e-6):
        assert kept("bf16, stochastic", lr) == pytest.approx(100, abs=1)


def test_squares_vanish_and_products_round_eight_times_as_much() -> None:
    zero = 100 * number("rounding", "zero_share", quantity="squares of gradients", dtype="fp16")
    check(PRECISION, r"as # % of the squares", [zero])
    half, brain = (
        number("rounding", "relative_error", quantity="logits", dtype=dtype) for dtype in ("fp16", "bf16")
    )
    assert brain / half == pytest.approx(8, rel=0.1)


def test_the_distance_of_values_near_a_weight() -> None:
    """2^(exponent - bits of fraction): of 0.02 the exponent is -6."""
    exponent = math.floor(math.log2(0.02))
    distances = [2.0 ** (exponent - 7) * 1e4, 2.0 ** (exponent - 10) * 1e5]
    check(PRECISION, r"bf16's values are #e-4 apart and fp16's #e-5", distances)


def output(name: str, dtype: str, power: int, offset: int = 0) -> float:
    return number("layer_norm", name, power=power, dtype=dtype, offset=offset)


def test_the_error_of_a_layer_norm() -> None:
    errors = [100 * output("product", "bf16", 0), 100 * output("product", "bf16", 0, 16)]
    check(LAYER_NORM, r"the output is off by # %, and by # % where", errors)
    check(LAYER_NORM, r"fp32 inside it is # % in both", [100 * output("kernel", "bf16", 0)])
    assert output("kernel", "bf16", 0) == pytest.approx(output("kernel", "bf16", 0, 16), rel=0.1)


def test_where_fp16_breaks() -> None:
    def edge(part: str, name: str) -> float:
        return number("layer_norm", name, part=part, dtype="fp16")

    assert edge("square", "greatest_scale") == 32
    assert edge("sum of squares", "greatest_scale") == 4
    assert edge("square", "least_scale") == 2.0**-9
    for part in ("mean", "difference", "reciprocal root", "product"):
        assert (edge(part, "least_scale"), edge(part, "greatest_scale")) == (2.0**-16, 2.0**13)
    assert output("product", "fp16", 8) == pytest.approx(1.0)  # The output is 0.


def test_the_numbers_of_operations() -> None:
    rules = [one.published for one in OPERATIONS.values()]
    assert (rules.count("widest"), rules.count("error")) == (10, 1)


def run(status: str, losses: list[float]) -> Record:
    train = {"losses": losses, "evaluations": [{"loss": losses[-1]}]}
    outcome = Outcome(status=status, request_id="0" * 16)  # pyright: ignore[reportArgumentType]
    return Record.model_construct(kind="train", outcome=outcome, train=train)


def test_the_tables_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss stands with its distance from the control's; a run that diverged is named and not drawn."""
    made_up = {
        "fp32": run("done", [3.0] * 100), "bf16": run("done", [3.25] * 100),
        "fp16-pure": run("diverged", [9.0]), "fp32 sgd": run("done", [4.0] * 100),
        "lora": run("done", [2.0] * 100), "lora nf4": run("done", [2.5] * 100),
    }  # fmt: skip
    monkeypatch.setattr(precision, "runs", lambda: made_up)
    table = precision.quality().splitlines()
    assert table[2:] == [
        "| `fp32` | 3.0000 | – | – | 4.0000 |", "| `bf16` | 3.2500 (+0.2500) | – | – | – |",
        "| `fp16-pure` | diverged | – | – | – |",
    ]  # fmt: skip
    assert precision.bases().splitlines()[2:] == [
        "| `bf16` | 2.0000 |",
        "| `quantize: nf4` | 2.5000 (+0.5000) |",
    ]
    drawn: list[Panel] = []
    monkeypatch.setattr(precision, "draw", lambda panels, *_, **__: drawn.extend(panels) or "")
    precision.curves()
    assert [[(one.label, *one.x, *one.y) for one in panel.series] for panel in drawn] == [
        [("bf16", 50, 100, 0.25, 0.25)]
    ]
    assert "| `bf16` | 19.54 |" in precision.tradeoff()


def test_the_steps_that_took_longer_than_predicted() -> None:
    estimates, measured = {}, {}
    for record in records(precision.MEMORY):
        (variant,) = (tag.removeprefix("variant:") for tag in record.tags if tag.startswith("variant:"))
        if record.estimate is not None:
            estimates[variant] = record.estimate
        if record.measurement is not None and record.measurement.step_s:
            measured[variant] = record.measurement.step_s
    slow = ("fp8", "lora int8", "lora nf4")
    longer = {name: 100 * (measured[name] / estimates[name].step_s - 1) for name in measured}
    assert all(share < 4 for name, share in longer.items() if name not in slow)
    shares = [longer[name] for name in slow]
    check(PRECISION, r"took # to # % longer than predicted", (min(shares), max(shares)))
    issue_ms, wait_ms = (
        [1e3 * getattr(estimates[name].time, part) for name in slow] for part in ("issue_s", "host_s")
    )
    check(PRECISION, r"issues these steps in # to # ms, and the GPU waits for it for # ms at most",
          (min(issue_ms), max(issue_ms), max(wait_ms)))  # fmt: skip
