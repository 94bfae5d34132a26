"""A full disk: one line, exit 74, nothing half-written, an intact last checkpoint, and a run that resumes."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from command_worker import Worker
from test_records import record
from tiny_sweep import BASE, sweep_of
from tiny_training import Listener, losses_in_log, options_for, tiny
from trainfit import records
from trainfit.cli.main import guarded
from trainfit.measurement.trial_files import ended_by_storage
from trainfit.spec.files import Appender, StorageError, one_line, storage_failure, writing
from trainfit.sweeps import parts
from trainfit.sweeps.journal import RECORDS, Journal
from trainfit.sweeps.parts import PartRequest, PartResult, run_part
from trainfit.sweeps.run import Run
from trainfit.training import checkpoint, durable
from trainfit.training.log import JsonlLog, TensorBoard
from trainfit.training.loop import train
from trial_start import forked

FULL = os.strerror(errno.ENOSPC)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2.5 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", folder]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, os.statvfs(disk).f_bavail * 4096)


def fails(error: Exception) -> Any:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def test_a_full_disk_ends_a_run_and_resume_goes_on_to_the_bit(small_disk: Path, tmp_path: Path) -> None:
    recipe, more = tiny(), {"save_every": 4, "keep": 9}
    straight = train(recipe, options_for(tmp_path / "straight", 24, **more))
    options = options_for(small_disk / "run", 24, **more)
    with pytest.raises(StorageError, match=FULL) as full:
        train(recipe, options, observers=[JsonlLog(), TensorBoard()])
    newest = checkpoint.existing(options.folder / "checkpoints")[-1]
    assert str(full.value).endswith(f": {FULL}; free some space there; --resume goes on from {newest}")
    assert ".unfinished" not in str(full.value)
    assert not list(options.folder.rglob(".unfinished*"))
    durable.check_folder(newest)
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    resumed = train(recipe, options.model_copy(update={"resume": True}), observers=[JsonlLog()])
    assert resumed.first_step == int(newest.name.removeprefix("step-")) > 0
    assert resumed.losses == straight.losses[resumed.first_step :]
    assert losses_in_log(options.folder) == dict(enumerate(straight.losses, 1))


@pytest.mark.parametrize("file", ["events", "log.jsonl", "train.bin"])
def test_every_file_of_a_run_may_be_the_one_that_fills_the_disk(file: str, small_disk: Path) -> None:
    """The disk is full when the first step is done, or before the data is written.

    What is left of the file's last page is filled by the lines themselves.
    """
    out = small_disk / "run"
    observers: list[Any] = [Listener()]
    if file == "train.bin":
        fill(small_disk)
    else:
        observers.append(TensorBoard() if file == "events" else JsonlLog())
        observers[0].on_start = lambda run: fill(small_disk)
    with pytest.raises(StorageError, match=FULL) as full:
        train(tiny(), options_for(out, 400), observers=observers)
    assert file in str(full.value) or file == "train.bin"
    assert "nothing had been saved: the same command" in str(full.value) or "no checkpoint" in str(full.value)
    if file == "log.jsonl":
        assert (out / "log.jsonl").read_bytes()[-2:] in (b"", b"}\n")


def test_the_train_command_ends_with_74_and_one_line(tmp_path: Path, worker: Worker) -> None:
    """On any machine: a limit on the size of a file ends a checkpoint's write."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(tiny().content()))
    words = f"train {recipe} --out run --steps 6 --data stories:60 --save-every 2 --json".split()
    ended = worker.run(*words, file_bytes=150_000, folder=tmp_path, memory_bytes=None)
    assert (ended.code, ended.out) == (74, "")
    errors = [line for line in ended.err.splitlines() if line.startswith("trainfit: error")]
    assert errors == [
        "trainfit: error: run/checkpoints/step-00000002/model-00000.safetensors: File too large; raise "
        "the limit of a file's size (ulimit -f); no checkpoint had been saved: --resume begins with the "
        "first step"
    ]
    assert "Traceback" not in ended.err
    again = worker.run(*words, "--resume", folder=tmp_path, memory_bytes=None)
    assert again.code == 0, again.err
    assert json.loads(again.out)["steps"] == 6


def test_a_full_standard_output_is_74(worker: Worker) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    for words in (["gpus"], ["gpus", "--json"], ["predict", "tiny-cpu"]):
        ended = worker.run(*words, out="/dev/full")
        assert ended.code == 74
        lines = [line for line in ended.err.splitlines() if not line.startswith("predicting ")]
        assert lines == [f"trainfit: error: standard output: {FULL}; free some space there"]


def test_a_closed_standard_output_is_74(tmp_path: Path) -> None:
    code = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    inner = "import sys; from trainfit.cli.entry import main; sys.exit(main())"
    ended = subprocess.run(
        [sys.executable, "-c", code, "-c", inner, "gpus"], stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr.count("\n")) == (74, 1)
    assert "standard output is closed" in ended.stderr


def test_an_appended_piece_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plain = tmp_path / "file", os.write
    with Appender(path) as file:
        file.append(b"whole\n")

        def half(descriptor: int, piece: Any) -> int:
            if len(piece) < 5:
                raise OSError(errno.ENOSPC, FULL)
            return plain(descriptor, piece[: len(piece) - 4])

        monkeypatch.setattr(os, "write", half)
        with pytest.raises(OSError, match="file") as full:
            file.append(b"another\n")
        assert full.value.filename == str(path)
        monkeypatch.undo()
        assert path.read_bytes() == b"whole\n"
        monkeypatch.setattr(os, "fsync", fails(OSError(errno.EIO, "no")))
        with pytest.raises(OSError, match="no"):
            file.append(b"another\n", sync=True)
        assert path.read_bytes() == b"whole\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.EDQUOT, "quota"), errno.EDQUOT),
        (Exception(f"{FULL} (os error 28)"), errno.ENOSPC),
        (RuntimeError(f"unable to write to file </torch_1>: {FULL} (28)"), errno.ENOSPC),
        (OSError("We couldn't connect to 'https://huggingface.co'"), None),
        (FileNotFoundError(errno.ENOENT, "none"), None),
        (ValueError(f"a text that says {FULL}"), None),
    ],
)
def test_what_is_the_storages_failure(error: Exception, code: int | None) -> None:
    outer = KeyError("outer")
    outer.__cause__ = error
    found = storage_failure(outer)
    assert (found and found.errno) == code
    assert guarded(fails(outer)) == (70 if code is None else 74)


def test_another_librarys_full_disk_names_the_file(small_disk: Path) -> None:
    with pytest.raises(OSError, match=r"a\.safetensors") as full, writing(small_disk / "a.safetensors"):
        save_file({"a": torch.zeros(2_000_000)}, small_disk / "a.safetensors")
    assert full.value.errno == errno.ENOSPC
    assert one_line(full.value).endswith("free some space there")


def test_a_full_record_file_is_an_os_error_with_its_name(small_disk: Path) -> None:
    path = small_disk / "r.sqlite"
    records.append(path, record(1))
    fill(small_disk)
    with pytest.raises(OSError, match=FULL) as full:
        records.append_all(path, [record(index) for index in range(2, 200)])
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(path))
    (small_disk / "filler").unlink()
    assert [one.recipe["seed"] for one in records.read(path)] == [1]


def main(folder: Path) -> int:
    """Trial whose disk is full: what the process of a sweep's part then does."""

    def run() -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "disk/model")

    return ended_by_storage(run)


class Executor:
    """Each part's result is that of ``run``, called in this process."""

    def __init__(self, run: Any):
        self.part = run

    def run(self, requests: Any, *, stop: Any, on_start: Any) -> Iterator[tuple[PartRequest, PartResult]]:
        for request in requests:
            yield request, self.part(request)


def test_a_trials_full_disk_is_not_its_recipes_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_of(tmp_path, BASE + "list: [{name: one}]\ntrain: {steps: 2}\n")

    def full(request: PartRequest) -> PartResult:
        module = __name__ if request.part == "train" else parts.PART_TRIAL
        return run_part(request, lambda folder, _: forked(folder, module))

    with (
        Journal(tmp_path / "out", "s") as journal,
        pytest.raises(StorageError, match=f"disk/model: {FULL}") as ended,
        capsys.disabled(),
    ):  # A trial's output goes to a file by its descriptors.
        Run(sweep, journal).go(Executor(full), lambda: False)
    assert "the same command goes on" in str(ended.value)
    lines = (tmp_path / "out" / RECORDS).read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["predict"]
    with Journal(tmp_path / "out", "s") as journal:
        state = Run(sweep, journal)
        state.go(Executor(lambda request: run_part(request, forked)), lambda: False)
        assert [row.status for row in state.rows()] == ["done"]
        assert state.num_kept == 1


def test_a_full_disk_of_the_sweep_itself_keeps_whole_lines(small_disk: Path, tmp_path: Path) -> None:
    variants = "".join(f"{{name: v{index}, seed: {index}}}, " for index in range(600))
    sweep = sweep_of(tmp_path, BASE + f"list: [{variants}]\n")

    executor = Executor(lambda request: parts.ended(request, "crashed", "x" * 5_000))
    with Journal(small_disk / "out", "s") as journal, pytest.raises(OSError, match=FULL) as full:
        Run(sweep, journal).go(executor, lambda: False)
    assert full.value.filename == str(small_disk / "out" / RECORDS)
    content = (small_disk / "out" / RECORDS).read_bytes()
    assert content.endswith(b"}\n")
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    with Journal(small_disk / "out", "s") as journal:
        state = Run(sweep, journal)
        state.go(executor, lambda: False)
        assert state.num_kept == content.count(b"\n")
        assert journal.notes == ()
