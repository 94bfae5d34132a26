"""Counts and sizes that this machine cannot take are refused before anything starts."""

from pathlib import Path

import pytest

import trainfit
from tiny_sweep import BASE
from tiny_training import tiny
from trainfit.cli.main import main
from trainfit.measurement import machine
from trainfit.spec import host_memory
from trainfit.spec.errors import InputError
from trainfit.verification import this_machine

Captured = pytest.CaptureFixture[str]


def test_processes_are_bounded_by_cores_and_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= machine.most_processes() <= max(machine.LEAST_PROCESSES, 2 * machine.num_cores())
    monkeypatch.setattr(machine, "available_bytes", lambda: 5 * machine.PROCESS_BYTES // 2)
    machine.check_processes(2, "jobs")
    with pytest.raises(InputError, match="use at most 2"):
        machine.check_processes(3, "jobs")


def test_ranks_are_bounded_by_the_gpus_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    machine.check_ranks(2, "auto", "--gpus")
    with pytest.raises(InputError, match="this machine shows 2 GPUs"):
        machine.check_ranks(3, "cuda", "--gpus")
    machine.check_ranks(3, "cpu", "--gpus")


def test_what_is_free_is_no_more_than_what_is_there() -> None:
    assert 0 < host_memory.available_bytes() <= host_memory.host_bytes()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train tiny-cpu --out run --gpus 9999999", "--gpus = 9999999: this machine has"),
        ("measure tiny-cpu --device cpu --set hardware={gpu: h200, count: 4096}", "hardware.count = 4096"),
        ("sweep sweep.yaml --out run --device cpu --jobs 1024", "jobs = 1024: this machine has"),
    ],
)
def test_every_count_that_starts_processes_is_checked(
    words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.yaml").write_text(BASE + "list: [{name: one}]\n")
    before, *rest = words.partition(" --set ")
    arguments = [*before.split(), *([rest[0].strip(), rest[1]] if rest[1] else [])]
    assert main(arguments) == 65
    assert says in capsys.readouterr().err


def test_workers_of_a_loader_are_checked(tmp_path: Path) -> None:
    recipe = tiny("loader.workers=1024")
    with pytest.raises(InputError, match=r"loader.workers = 1024: this machine has"):
        trainfit.train(recipe.content(), out=tmp_path, steps=1, data="stories:60", device="cpu")


def test_a_step_that_the_machine_does_not_hold_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its prediction on the CPU, so that it does not end in swap; ``force`` tries."""
    given = {"out": tmp_path / "run", "steps": 1, "data": "stories:60", "device": "cpu"}
    monkeypatch.setattr(this_machine, "available_bytes", lambda: 2**28)
    for call in (
        lambda: trainfit.train(tiny().content(), **given),
        lambda: trainfit.measure(tiny().content(), device="cpu", steps=1),
    ):
        with pytest.raises(
            InputError, match=r"the step takes .* as predicted, and this machine has 256.00 MiB"
        ):
            call()
    assert not (tmp_path / "run").exists()
    assert trainfit.train(tiny().content(), **given, force=True).steps == 1


def test_a_gpu_that_is_too_small_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        def __init__(self, index: int):
            assert index == 1

        def total_bytes(self) -> int:
            return 2**26

        def name(self) -> str:
            return "NVIDIA H200"

    monkeypatch.setattr(this_machine, "Nvml", Small)
    monkeypatch.setattr(this_machine, "runs_on_cuda", lambda device: True)
    with pytest.raises(InputError, match=r"NVIDIA H200 has 64.00 MiB"):
        this_machine.check_memory(tiny(), "cuda:1")
