"""``bench compile``: recompilations of a changed length, and when compiling pays."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from trainfit.bench.experiments import compile as experiment
from trainfit.bench.harness.runner import run
from trainfit.spec.bench import BenchRow


@pytest.fixture(scope="module")
def lengths() -> dict[str, list[BenchRow]]:
    rows = run("compile", device="cpu", form="tiny", only={"part": ["lengths"]}).rows
    return {kind: [row for row in rows if row.point["shapes"] == kind] for kind in experiment.SHAPES}


def test_graphs_of_changed_lengths(lengths: dict[str, list[BenchRow]]) -> None:
    """Static: one a length. PyTorch's default: one more at the first change. Dynamic: one for all."""
    graphs = {kind: [row.numbers["new_graphs"] for row in rows] for kind, rows in lengths.items()}
    assert graphs == {"static": [1, 1, 1], "automatic": [1, 1, 0], "marked": [1, 0, 0], "dynamic": [1, 0, 0]}


def test_a_length_without_a_new_graph_takes_no_time_to_compile(lengths: dict[str, list[BenchRow]]) -> None:
    compiling = [row.numbers for rows in lengths.values() for row in rows]
    with_graph = [float(one["compile_s"]) for one in compiling if one["new_graphs"]]
    without = [float(one["compile_s"]) for one in compiling if not one["new_graphs"]]
    assert sorted(without)[len(without) // 2] < min(with_graph)


def test_it_pays_from_the_step_that_makes_the_run_shorter() -> None:
    samples = [10.0, 1.5, 1.0, 1.0, 1.0]
    found = experiment.first_numbers(samples, eager_s=1.5)
    assert found == {"first_s": 10.0, "second_s": 1.5, "compile_s": 9.0, "pays_from_steps": 19}
    assert 9 + 19 * 1.0 < 19 * 1.5
    assert 9 + 18 * 1.0 >= 18 * 1.5
    assert "pays_from_steps" not in experiment.first_numbers(samples, eager_s=1.0)
    assert experiment.first_numbers(samples, None) == {"first_s": 10.0, "second_s": 1.5}


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor's programs for a CPU are C++")
def test_a_kept_cache_holds_what_an_earlier_run_compiled(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor import config

    def compiled() -> tuple[int, int]:
        experiment.forget_programs()
        torch.compile(lambda x: x.sin() + 1)(torch.ones(64))
        found = counters["inductor"]
        return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]

    before = os.environ.get(experiment.CACHE)
    # Precompiled headers of a new folder would take most of the time.
    with experiment.cache_in(str(tmp_path)), config.patch({"cpp_cache_precompile_headers": False}):
        assert [compiled(), compiled()] == [(0, 1), (1, 0)]
    assert os.environ.get(experiment.CACHE) == before
    assert not torch._dynamo.utils.counters["stats"]
