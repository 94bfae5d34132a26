"""The fit of what the power limit adds to attention."""

import json

import pytest

from evidence.scripts import attention_power
from evidence.scripts.attention_power import GRID, Step, loss, ranked, with_values
from evidence.scripts.tables.joined import RESULTS
from trainfit.catalog.rates import TensorShares, rates


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


def test_the_catalogs_values_are_points_of_the_grid() -> None:
    power = rates().power
    assert all(getattr(power, name) in values for name, values in GRID.items())


def test_every_kernel_slows_down_alike_in_mixes() -> None:
    """Why one rule serves all kernels: at the power limit cuDNN's attention loses what trainfit's does."""
    lines = (RESULTS / "power/mixes-h200.jsonl").read_text("utf-8").splitlines()
    found = dict[str, list[float]]()
    for line in map(json.loads, lines):
        if line["attention"] and line["shares"].get("bfloat16", 0) > 0.75:
            name = line["attention"]
            found.setdefault(name, []).append(line["over_alone"][f"{name} backward"])
    assert len(found) == 5
    assert all(1.15 < one < 1.3 for several in found.values() for one in several)
