"""What the bounds of a script's step claim is what the measured scripts show."""

from pathlib import Path

import pytest

from evidence.scripts.script_steps import fit
from trainfit.catalog.rates import rates


def test_costs_and_coverage_are_those_of_the_measured_scripts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    inside, steps = fit.main()
    assert f"{inside} of {steps} steps" in rates().script_host.basis
    host, band = rates().host, rates().script_host
    assert (band.low, band.high) == fit.RANGE
    shown = capsys.readouterr().out
    for cost in (host.script_launch, host.script_call, host.script_block):
        assert f"{cost:.3g}" in shown
