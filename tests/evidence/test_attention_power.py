"""The fit of what the power limit adds to attention, and the mixes of kernels beside it."""

import json
from collections.abc import Iterator

import pytest

from evidence.scripts import attention_power, power_mixes
from evidence.scripts.attention_power import (
    CHECKED,
    GRID,
    Step,
    is_learned_from,
    loss,
    ranked,
    with_values,
    written,
)
from evidence.scripts.power_mixes import Mixes, wanted
from evidence.scripts.tables.joined import RESULTS
from page_claims import ROOT, check
from trainfit.catalog.rates import TensorShares, rates

STEPS = written(RESULTS / "power/attention-steps.jsonl")
STEP_TIME = ROOT / "docs/internals/step-time.md"


def test_the_fit_finds_the_values_that_steps_were_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {name: values[2:5] for name, values in GRID.items()}
    monkeypatch.setattr(attention_power, "GRID", small)
    true = tuple(values[1] for values in small.values())
    power = with_values(rates().power, true)
    shares = [
        TensorShares(products, fp8, attention)
        for products, fp8, attention in (
            (0.2, 0, 0.2), (0.5, 0, 0.4), (0.7, 0, 0.2), (0.3, 0.4, 0.2), (0.2, 0, 0.75), (0, 0.5, 0.3)
        )
    ]  # fmt: skip
    steps = [
        Step("", "", one, 2.0 + power.attention_slowdown(one), rest_s=2.0, attention_s=1.0) for one in shares
    ]
    far = steps[0]._replace(measured_s=1.3 * steps[0].measured_s)
    (misfit, found), *_ = ranked([*steps, far], rates().power)
    assert found == true
    assert misfit == pytest.approx(loss([far], power))


def test_the_catalogs_values_fit_the_recorded_steps_best() -> None:
    learned = list(filter(is_learned_from, STEPS))
    (_, best), *_ = ranked(learned, rates().power)
    assert dict(zip(GRID, best, strict=True)) == {name: getattr(rates().power, name) for name in GRID}
    fit = (ROOT / "src/trainfit/catalog/rates.toml").read_text("utf-8").partition("[fits.attention_power]")[2]
    assert f"by {len(learned)} steps" in fit


def off(kind: str) -> list[float]:
    """Return the errors of expected tokens a second, in percent."""
    return [100 * abs(step.ratio(rates().power) - 1) for step in STEPS if step.kind == kind]


def test_the_page_states_how_far_steps_that_were_not_learned_from_are_off() -> None:
    earlier, first = (off(kind) for kind in CHECKED)
    assert (len(earlier), len(first)) == (4, 5)
    check(ROOT / "evidence/pages/kernels.md", "and is at most # % off for them", (max(earlier),))


def test_the_example_of_a_step_of_8b_is_that_of_its_record() -> None:
    (step,) = (one for one in STEPS if one.name == "8b-bf16-8k")
    power, shares = rates().power, step.shares
    text = STEP_TIME.read_text("utf-8")
    load = (
        f"{shares.products:.3f} + {power.attention_load} * {shares.attention:.3f} = {power.load(shares):.3f}"
    )
    slowdown = f"({power.load(shares):.3f} - {power.attention_from}) = {power.attention_slowdown(shares):.2f}"
    assert load in text
    assert slowdown in text
    assert f"({step.measured_s / step.attention_s:.2f} measured)" in text
    module = (ROOT / "src/trainfit/prediction/time/power_limit.py").read_text("utf-8")
    assert load in module
    assert slowdown in module


def mixes() -> Iterator[dict[str, object]]:
    yield from map(json.loads, (RESULTS / "power/mixes-h200.jsonl").read_text("utf-8").splitlines())


def test_the_page_states_what_attention_loses_among_products() -> None:
    """Why one rule serves all kernels."""
    found = dict[str, list[float]]()
    for line in mixes():
        shares, over, name = line["shares"], line["over_alone"], line["attention"]
        if name and 0.75 < shares.get("bfloat16", 0) < 0.85:
            found.setdefault(name, []).extend((over[name], over[f"{name} backward"]))
    assert len(found) == 5
    every = sorted(value for several in found.values() for value in several)
    check(STEP_TIME, "flash attention take # to # times as long as alone", (every[0], every[-1]))


def test_mixes_are_120_and_their_marks_are_those_of_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(list(wanted())) == len(list(mixes())) == 120
    mix = Mixes.__new__(Mixes)
    done = list[str]()

    class Marks:
        def mark(self) -> int:
            done.append("|")
            return 0

    def run(name: str) -> power_mixes.Run:
        return lambda: done.append(name)

    mix.stopwatch = Marks()  # type: ignore[assignment]
    mix.runs = {"add": (run("a"),), "attend": (run("f"), run("b"))}
    counts = {"add": 3, "attend": 2}
    marks = mix._cycle(counts)
    assert "".join(done) == "|aaa|f|b|f|b|"
    assert mix._order(counts) == [("add", 0), *[("attend", 0), ("attend", 1)] * 2]
    assert len(marks) == len(mix._order(counts)) + 1
