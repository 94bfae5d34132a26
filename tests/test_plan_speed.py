"""How long a plan for a memory budget takes, imports left out: the goal is 80 layers in under two seconds, undisturbed."""

import time
from pathlib import Path
from typing import Any

import pytest

from trainfit.plan.recompute import plan
from trainfit.spec.recipe import Batch, Hardware, Optimizer
from trainfit.spec.recompute import BudgetGib, Layers
from virtual_runs import recipe_of

MOST_S = 3.5
"""Of processor time, the best of two. On a machine that others load it takes 1.9 (native) and 2.1 (hf)."""


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["native", "hf"])
def test_80_layers_are_planned_in_seconds(
    implementation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"batch": Batch(micro=1, seq=4096), "precision": "bf16", "loss": "chunked"}
    fields |= {"hardware": Hardware(gpu="h200"), "optimizer": Optimizer(in_backward=True)}
    small = recipe_of("llama-3.2-1b", implementation, **fields, recompute=BudgetGib(budget_gib=12))
    deep = recipe_of("llama-3.1-70b", implementation, **fields, recompute=BudgetGib(budget_gib=420))
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "small"))
    plan(small)  # Imports are not the plan's.
    took_s: list[float] = []
    for number in range(2):
        monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / str(number)))
        start = time.process_time()
        found = plan(deep)
        took_s.append(time.process_time() - start)
        assert isinstance(found.recipe.recompute, Layers)
        if took_s[-1] < MOST_S:
            break
    assert min(took_s) < MOST_S
