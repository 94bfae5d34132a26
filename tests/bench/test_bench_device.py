"""Whose times an experiment records, the order in which L2 is read, errors of phases."""

import pytest

from trainfit.bench.experiments import memory
from trainfit.bench.harness.discovery import experiment, experiment_names
from trainfit.bench.harness.memory_prediction import RunMemory
from trainfit.bench.harness.runner import run
from trainfit.bench.workloads.memory_levels import stride
from trainfit.measurement.environment import cpu_name


def test_the_hosts_experiment_names_the_cpu_though_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU it is in full form, and no CUDA stopwatch is made, which would fail here."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    result = run("accumulation", limit_s=0)
    assert (result.form, result.environment.device, result.gpu) == ("full", cpu_name(), None)
    assert result.environment.driver is None
    assert [name for name in experiment_names() if experiment(name).on_host] == ["accumulation"]


def test_every_result_names_the_cpu() -> None:
    assert run("autocast", device="cpu", limit_s=0).settings["cpu"] == cpu_name()


L2_BLOCKS, PROGRAMS, MULTIPROCESSORS = 62_914_560 // (32 * 1024), 264, 132
"""Of an H200."""


@pytest.mark.parametrize("share", [8, 4, 2])
def test_programs_of_a_multiprocessor_do_not_read_the_same_near_in_time(share: int) -> None:
    blocks = L2_BLOCKS // share
    step = stride(blocks, PROGRAMS)
    assert len({turn * step % blocks for turn in range(blocks)}) == blocks  # Each program comes to all.
    near = range(-8, 9)
    for apart in (MULTIPROCESSORS, *range(1, 8)):
        assert all((apart + turn * step) % blocks for turn in near), apart


def test_a_block_of_a_large_set_is_read_again_as_late_as_it_allows() -> None:
    blocks = L2_BLOCKS // 2
    step = stride(blocks, PROGRAMS)
    first, second, third = ({(p + turn * step) % blocks for p in range(PROGRAMS)} for turn in range(3))
    assert not first & second
    assert not (first | second) & third


@pytest.mark.parametrize(
    ("phases", "before", "expected"),
    [
        ({"forward": 10, "backward": 30}, 5, "+0 bytes"),
        ({"forward": 524_298, "backward": 30}, 5, "+524,288 bytes (forward)"),
        ({"forward": 10, "backward": 28}, 6, "-2 bytes (backward)"),
        ({"forward": 10, "backward": 30}, 1, "-4 bytes (before)"),
    ],
)
def test_the_worst_phase_of_a_prediction_is_named(phases: dict[str, int], before: int, expected: str) -> None:
    """Though the peaks are equal."""
    measured = RunMemory(5, {"forward": 10, "backward": 30}, 30, None)
    found = RunMemory(before, phases, 30, None)
    assert memory.largest_difference(found, measured) == expected
    row = memory._row({"source": "predicted"}, found, measured)
    assert row.numbers["phase_off_by"] == expected
