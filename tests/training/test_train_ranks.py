"""Training on two processes: the losses of one, checkpoints for any number of ranks, one end for all."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rank_training
from rank_processes import Ranks
from test_forged_checkpoints import sealed
from tiny_training import losses_in_log, options_for
from trainfit.cli.train import _with_count
from trainfit.spec.errors import InputError
from trainfit.training.export.tensors import CheckpointTensors
from trainfit.training.log import LOG
from trainfit.training.loop import train

EQUAL = 1e-6


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as running:
        yield running


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """An unbroken run of one process, with a checkpoint after step 2."""
    out = tmp_path_factory.mktemp("alone")
    return rank_training.trained(out, None, 6, save_every=2, keep=9) | {"out": out}


def copy_until(out: Path, step: int, to: Path) -> Path:
    """Copy a run, without checkpoints after ``step``."""
    shutil.copytree(out, to)
    for path in (to / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return to


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "bucketed"])
def test_two_ranks_have_the_losses_of_one_process_and_go_on_in_it(ranks, alone, tmp_path, strategy) -> None:
    first, second = ranks.run(rank_training.trained, tmp_path / "two", strategy, 6, save_every=2, keep=9)
    assert first["losses"] == second["losses"]
    assert first["losses"] == pytest.approx(alone["losses"], abs=EQUAL)
    assert first["perplexity"] == second["perplexity"] == pytest.approx(alone["perplexity"], rel=EQUAL)
    assert first["tokens_per_step"] == alone["tokens_per_step"] == 4 * 32
    assert first["epochs"] == alone["epochs"]
    assert (first["events"], second["events"]) == (alone["events"], [])
    assert losses_in_log(tmp_path / "two") == dict(enumerate(first["losses"], 1))
    # Two ranks -> one, whose checkpoint two of another strategy take over.
    moved = copy_until(tmp_path / "two", 2, tmp_path / "moved")
    four = rank_training.trained(moved, None, 4, resume=True)
    assert any("ranks was 2 and is 1" in note for note in four["notes"])
    assert four["losses"] == pytest.approx(alone["losses"][2:4], abs=EQUAL)
    other = {"fsdp": "zero1", "zero1": "ddp", "bucketed": "fsdp"}[strategy]
    last, _ = ranks.run(rank_training.trained, moved, other, 6, resume=True)
    assert last["losses"] == pytest.approx(alone["losses"][4:], abs=EQUAL)
    assert last["perplexity"] == pytest.approx(alone["perplexity"], rel=EQUAL)


@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_a_quantised_base_is_saved_from_shards_and_whole(ranks, tmp_path, kind) -> None:
    """Codes are shards of another dtype on two ranks; one process goes on from them, and the ranks again."""
    qlora = (f"quantize={kind}", "adapter.kind=lora", "adapter.rank=4")
    alone = rank_training.trained(tmp_path / "alone", None, 3, *qlora)
    first, _ = ranks.run(rank_training.trained, tmp_path / "two", "fsdp", 1, *qlora)
    assert first["status"] == "done"
    second = rank_training.trained(tmp_path / "two", None, 2, *qlora, resume=True)
    third, _ = ranks.run(rank_training.trained, tmp_path / "two", "fsdp", 3, *qlora, resume=True)
    found = [*first["losses"], *second["losses"], *third["losses"]]
    assert found == pytest.approx([*alone["losses"]], abs=EQUAL)


def test_tensor_parallel_ranks_have_the_losses_of_one_process_and_keep_their_number(ranks, tmp_path) -> None:
    fields = ("model.config.num_key_value_heads=2", "batch.accumulate=1")
    one = rank_training.trained(tmp_path / "one", None, 4, *fields)["losses"]

    def run(steps: int, *settings: str, **more: bool) -> list[dict]:
        return ranks.run(rank_training.trained, tmp_path / "two", "auto", steps, *fields, *settings, **more)

    assert run(2, "parallel.tensor=2")[0]["losses"] == pytest.approx(one[:2], abs=EQUAL)
    resumed, other = run(4, "parallel.tensor=2", resume=True)
    assert resumed["losses"] == other["losses"] == pytest.approx(one[2:], abs=EQUAL)
    with pytest.raises(AssertionError, match="parallel.tensor = 1: the run was started with 2"):
        run(4, "batch.micro=1", resume=True)
    with pytest.raises(AssertionError, match="cannot hold the 8-bit or 4-bit moments of FSDP2's shards"):
        ranks.run(rank_training.trained, tmp_path / "codes", "fsdp", 2, "optimizer.name=adamw8bit")


@pytest.mark.parametrize(
    "settings", [(), ("adapter.kind=lora", "adapter.rank=4", "quantize=fp8")], ids=["weights", "adapter"]
)
def test_native_tensor_parallel_ranks_resume_from_the_models_rows(ranks, tmp_path, settings) -> None:
    """Fused projections are in the model's order in checkpoints, whose bytes are what one process saves."""
    fields = ("model.config.num_key_value_heads=2", "batch.accumulate=1", "model.implementation=native")
    fields = (*fields, *settings)
    one = rank_training.trained(tmp_path / "one", None, 4, *fields)["losses"]

    def run(steps: int, **more: bool) -> dict:
        found = ranks.run(
            rank_training.trained, tmp_path / "two", "auto", steps, *fields, "parallel.tensor=2", **more
        )
        return found[0]

    assert run(2)["losses"] == pytest.approx(one[:2], abs=1e-5)
    assert run(4, resume=True)["losses"] == pytest.approx(one[2:], abs=1e-5)
    whole = CheckpointTensors(tmp_path / "one" / "checkpoints" / "step-00000004")
    shards = CheckpointTensors(tmp_path / "two" / "checkpoints" / "step-00000004")
    assert whole.forms == shards.forms
    for name in whole.forms:
        expected, found = whole.read(name).float(), shards.read(name).float()
        assert torch.allclose(found, expected, atol=0 if "codes" in name else 1e-4, rtol=0), name


def test_ranks_that_share_experts_resume_bit_for_bit_and_go_on_in_one_process(ranks, tmp_path) -> None:
    experts = ("model_type=olmoe", "num_experts=4", "num_experts_per_tok=2")
    fields = tuple(f"model.config.{field}" for field in experts)

    def run(out: str, steps: int, **more: bool) -> list[float]:
        settings = (*fields, "parallel.expert=2")
        first, second = ranks.run(rank_training.trained, tmp_path / out, "fsdp", steps, *settings, **more)
        assert first["losses"] == second["losses"]
        return first["losses"]

    straight, begun = run("straight", 4), run("begun", 2)
    shutil.copytree(tmp_path / "begun", tmp_path / "alone")
    assert begun + run("begun", 4, resume=True) == straight
    alone = rank_training.trained(tmp_path / "alone", None, 4, *fields, resume=True)
    assert alone["losses"] == pytest.approx(straight[2:], abs=EQUAL)


def test_other_sequences_a_step_are_refused_on_resume(alone) -> None:
    recipe = rank_training.recipe_of(None, "batch.accumulate=4")
    with pytest.raises(InputError) as refused:
        train(recipe, options_for(alone["out"], 7, resume=True))
    assert refused.value.field == "batch.accumulate"


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_a_signal_at_one_rank_stops_all_and_resume_repeats_every_bit(ranks, tmp_path, strategy) -> None:
    def run(out: str, steps: int = 5, **more: object) -> list[dict]:
        return ranks.run(rank_training.trained, tmp_path / out, strategy, steps, dropout=True, **more)

    straight, other = run("straight")
    assert straight["losses"] == other["losses"]
    stopped = run("broken", signal_at=3)
    assert [one["status"] for one in stopped] == ["stopped", "stopped"]
    assert stopped[0]["message"] == "SIGTERM after step 3 of 5; --resume goes on from it"
    resumed, _ = run("broken", resume=True)
    assert stopped[0]["losses"] + resumed["losses"] == straight["losses"]
    assert resumed["perplexity"] == straight["perplexity"]


def test_a_loss_that_is_no_number_ends_all_ranks_alike(ranks, tmp_path) -> None:
    settings = ("optimizer.name=sgd", "optimizer.lr=1e30", "optimizer.weight_decay=0")
    both = ranks.run(rank_training.trained, tmp_path, "ddp", 50, *settings, eval_fraction=0.0)
    assert both[0]["status"] == "diverged"
    assert [one["steps"] for one in both] == 2 * [both[0]["steps"]]


def test_a_full_disk_at_one_rank_ends_all_and_leaves_the_older_checkpoint(ranks, tmp_path) -> None:
    first, second = ranks.run(rank_training.on_a_full_disk, tmp_path)
    for error in (first, second):
        assert error.startswith("StorageError: "), error
        assert "step-00000004" in error
        assert "--resume goes on from" in error
        assert "step-00000002" in error
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    resumed, _ = ranks.run(rank_training.trained, tmp_path, "fsdp", 4, resume=True)
    assert resumed["status"] == "done"


class Hostile:
    def __reduce__(self) -> tuple:
        return print, ("executed",)


def test_an_index_that_holds_anything_but_tensors_is_refused(ranks, tmp_path, capsys, monkeypatch) -> None:
    ranks.run(rank_training.trained, tmp_path / "run", "ddp", 2)
    folder = tmp_path / "run" / "checkpoints" / "step-00000002"
    whole = (folder / ".metadata").read_bytes()
    entry = pickle.loads(whole).storage_data
    foreign = whole.replace(next(iter(entry.values())).relative_path.encode(), b"../0_0.disc")
    (tmp_path / "foreign_module.py").write_text("print('executed')")
    monkeypatch.syspath_prepend(tmp_path)
    imports = b"cforeign_module\nfloat32\n."
    for content in (pickle.dumps(Hostile()), imports, pickle.dumps({}), whole[:100], foreign):
        (folder / ".metadata").write_bytes(content)
        sealed(folder)
        with pytest.raises(InputError, match=r"\.metadata: not shards that trainfit wrote"):
            rank_training.trained(tmp_path / "run", None, 3, resume=True)
    assert "executed" not in capsys.readouterr().out
    (folder / ".metadata").write_bytes(whole)
    sealed(folder)
    assert rank_training.trained(tmp_path / "run", None, 3, resume=True)["status"] == "done"


def test_a_number_of_processes_that_is_not_the_recipes_is_refused(tmp_path, monkeypatch) -> None:
    with pytest.raises(
        InputError, match="2 GPUs need 2 processes, and this run has 1; use trainfit train --gpus 2"
    ):
        rank_training.trained(tmp_path, "fsdp", 1)
    two = "batch={micro: 1, seq: 8}", "hardware.count=2"
    assert _with_count("gpt2", list(two), 2)[-1] == "hardware.count=2"
    assert _with_count("gpt2", ["batch.seq=8"], 4) == ["batch.seq=8", "hardware.count=4"]
    with pytest.raises(InputError, match="--gpus 4 disagrees; use --gpus 2"):
        _with_count("gpt2", list(two), 4)
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="started 2 processes, and the recipe is for one GPU; add --gpus 2"):
        rank_training.trained(tmp_path, None, 1)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="65"):
        rank_training.trained(tmp_path, None, 1)
    assert not list(tmp_path.iterdir())


def rank_processes(launcher: int) -> dict[int, int]:
    """Return the process ids of a launcher's ranks, by rank."""
    found = {}
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(one[5:]): int(pid) for one in variables if one.startswith(b"RANK=")}
    return found


def test_the_command_trains_on_two_ranks_and_a_killed_one_ends_it_for_resume(ranks, tmp_path) -> None:
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(json.dumps(rank_training.recipe_of("fsdp").content()))
    process = subprocess.Popen(
        [
            sys.executable, "-m", "trainfit", "train", str(recipe), "--out", str(out), "--gpus", "2",
            "--device", "cpu", "--steps", "100000", "--save-every", "2", "--keep", "9", "--no-tensorboard",
            "--data", "stories:60", "--eval-fraction", "0.1", "--json",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"TRAINFIT_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    try:
        while not (out / "checkpoints" / "step-00000004").exists():
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        pids = rank_processes(process.pid)
        os.kill(pids[1], signal.SIGKILL)
        killed_s = time.monotonic()
        printed, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert time.monotonic() - killed_s < 20  # Before ranks without a heartbeat are given up, after 30 s
    assert (process.returncode, printed) == (75, "")
    (line,) = [line for line in errors.splitlines() if "error" in line]
    assert line.startswith(
        f"trainfit: error: rank 1 (process {pids[1]}) was ended by SIGKILL; all ranks end;"
    )
    assert "--resume goes on from" in line
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values()), "no orphan"
    steps = [json.loads(text) for text in (out / LOG).read_text().splitlines()]
    before = {one["step"]: one["loss"] for one in steps}
    copy_until(out, 2, tmp_path / "moved")
    resumed, _ = ranks.run(rank_training.trained, tmp_path / "moved", "fsdp", 4, resume=True)
    assert resumed["losses"] == (before[3], before[4]), "to the last bit"
