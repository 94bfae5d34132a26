"""A resumed run has the losses of an unbroken one to the last bit, or is refused."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from tiny_training import GPT2, LLAMA, Listener, losses_in_log, options_for, stop_at, tiny
from trainfit.api import calls
from trainfit.spec.errors import InputError
from trainfit.training import folder
from trainfit.training.folder import locked
from trainfit.training.log import LOG, JsonlLog, Kept, TensorBoard, cut_after
from trainfit.training.loop import train
from trainfit.training.options import SyntheticData


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    train(tiny(), options_for(out, 3), observers=[JsonlLog()])
    return out


@pytest.fixture
def finished(three_steps, tmp_path) -> Path:
    """A copy of a run of three steps."""
    return shutil.copytree(three_steps, tmp_path / "run")


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (LLAMA, ("precision=amp-bf16", "batch.accumulate=2")),
        (GPT2, ("attention=eager",)),
        (LLAMA, ("adapter={kind: lora, rank: 4, dropout: 0.1}", "precision=bf16")),
    ],
    ids=["amp-accumulate", "gpt2-dropout", "lora-dropout"],
)
def test_five_steps_and_five_more_are_ten_to_the_last_bit(tmp_path, config, settings):
    recipe = tiny(*settings, "optimizer.clip_norm=1.0", config=config)
    more = {"schedule": "cosine", "warmup_steps": 3, "eval_every": 4}
    straight = train(recipe, options_for(tmp_path / "straight", 10, **more), observers=[JsonlLog()])
    options = options_for(tmp_path / "broken", 10, **more)
    first = train(recipe, options, observers=[Listener(stop_at(5)), JsonlLog()])
    assert (first.status, first.exit_code, first.steps) == ("stopped", 75, 5)
    second = train(recipe, options.model_copy(update={"resume": True}), observers=[JsonlLog()])
    assert (second.status, second.exit_code, second.first_step) == ("done", 0, 5)
    assert first.losses + second.losses == straight.losses
    assert second.eval_perplexity == straight.eval_perplexity
    for name in ("broken", "straight"):
        assert losses_in_log(tmp_path / name) == dict(enumerate(straight.losses, 1))


def test_a_killed_run_goes_on_from_its_checkpoint_and_its_log_has_no_step_twice(tmp_path, worker):
    recipe = tiny()
    straight = train(recipe, options_for(tmp_path / "straight", 12))
    killed = options_for(tmp_path / "killed", 12, save_every=4)
    code = (
        "import sys, signal; from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1] / 'helpers')!r}); import tiny_training as t\n"
        "from trainfit.training.log import JsonlLog; from trainfit.training.loop import train\n"
        f"o = t.options_for(Path({killed.out!r}), 12, save_every=4)\n"
        "train(t.tiny(), o, observers=[JsonlLog(), t.Listener(t.stop_at(10, signal.SIGKILL))])"
    )
    assert worker.run(first=code, memory_bytes=None).code == -signal.SIGKILL
    assert len(losses_in_log(killed.folder)) == 10
    with (killed.folder / LOG).open("a") as log:
        log.write('{"kind": "step", "st')  # What a kill in the middle of a write leaves.
    resumed = train(recipe, killed.model_copy(update={"resume": True}), observers=[JsonlLog()])
    assert resumed.first_step == 8
    assert resumed.losses == straight.losses[8:]
    assert losses_in_log(killed.folder) == dict(enumerate(straight.losses, 1))


def test_tensorboard_has_the_losses(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = train(tiny(), options_for(tmp_path, 6, save_every=2, keep=9), observers=[TensorBoard()])
    for newer in ("step-00000006", "step-00000004"):
        shutil.rmtree(tmp_path / "checkpoints" / newer)
    train(tiny(), options_for(tmp_path, 6, resume=True), observers=[TensorBoard()])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [event.step for event in events] == [1, 2, 3, 4, 5, 6], "steps taken again are shown once"
    assert [event.value for event in events] == pytest.approx(first.losses, rel=1e-6)


def test_a_resumed_run_that_would_be_another_is_refused(three_steps):
    for field, settings, more in (
        ("batch.micro", ("batch.micro=8",), {}),
        ("model.config.hidden_size", ("model.config.hidden_size=64",), {}),
        ("data.num_documents", (), {"data": SyntheticData(num_documents=61)}),
        ("warmup_steps", (), {"warmup_steps": 2}),
    ):
        with pytest.raises(InputError) as refused:
            train(tiny(*settings), options_for(three_steps, 4, resume=True, **more))
        assert refused.value.field == field


def test_run_settings_may_change_on_resume(finished):
    saved = sorted(finished.glob("checkpoints/*"))
    changed = options_for(finished, 3, resume=True, eval_every=1, keep=1, eval_sequences=2)
    summary = train(tiny("hardware.gpu=l4", "model.name=other"), changed)
    assert (summary.status, summary.losses, summary.steps) == ("done", (), 3)
    assert summary.final_loss is not None
    assert summary.evaluations[0].sequences == 2
    assert sorted(finished.glob("checkpoints/*")) == saved


def test_a_used_folder_is_refused(three_steps, tmp_path):
    with pytest.raises(InputError, match="already holds a run"):
        train(tiny(), options_for(three_steps, 5))
    with pytest.raises(InputError, match="already has 3 steps"):
        train(tiny(), options_for(three_steps, 2, resume=True))
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("Call me Ishmael.")
    with pytest.raises(InputError, match=r"chapter1\.txt"):
        train(tiny(), options_for(tmp_path / "thesis", 5))
    with pytest.raises(InputError, match="no run to resume"):
        train(tiny(), options_for(tmp_path / "empty", 5, resume=True))
    with locked(three_steps), pytest.raises(InputError, match="another process"):
        train(tiny(), options_for(three_steps, 5, resume=True))


def test_a_used_folder_is_refused_before_anything_is_predicted(three_steps, monkeypatch):
    def planned(*_):
        raise AssertionError("too late")

    monkeypatch.setattr(calls, "planned", planned)
    with pytest.raises(InputError, match="already holds a run"):
        calls.train("tiny-cpu", out=three_steps, steps=5)
    with pytest.raises(InputError, match="no run to resume"):
        calls.train("tiny-cpu", out=three_steps / "checkpoints", steps=5, resume=True)


def test_a_damaged_checkpoint_is_refused_even_where_an_older_one_is_whole(tmp_path):
    train(tiny(), options_for(tmp_path, 4, save_every=2))
    file = tmp_path / "checkpoints" / "step-00000004" / "optimizer-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match="SHA-256") as refused:
        train(tiny(), options_for(tmp_path, 6, resume=True))
    assert refused.value.file == str(file)


# The log of a resumed run


def line(step: int, kind: str = "step") -> str:
    return json.dumps({"kind": kind, "step": step, "loss": 1.0}) + "\n"


MISSING_TWICE_UNORDERED = (
    "has no line of steps 4 to 5, has step 2 more than once, is not in the order of the steps"
)


def test_gaps_of_a_long_log_are_described_at_once():
    begin_s = time.monotonic()
    assert Kept(range(2, 200_001, 2)).gaps(200_000).startswith("has no line of steps 1, 3, 5")
    assert time.monotonic() - begin_s < 10


@pytest.mark.parametrize(
    ("steps", "gaps"),
    [
        ([1, 2, 3, 4, 5, 6], ""),
        ([1, 2, 4, 6], "has no line of steps 3, 5"),
        ([1, 2, 3, 4, 5], "has no line of step 6"),
        ([], "has no line of steps 1 to 6"),
        ([1, 2, 9, 3, 4, 6, 5], "is not in the order of the steps"),
        ([1, 3, 2, 2, 6], MISSING_TWICE_UNORDERED),
    ],
)
def test_gaps_of_a_log_are_described_and_no_line_up_to_the_step_is_lost(steps, gaps, tmp_path):
    path = tmp_path / LOG
    path.write_text("".join(map(line, steps)) + line(4, "eval") + line(7) + '{"kind": "st')
    assert cut_after(path, 6).gaps(6) == gaps
    kept = [step for step in steps if step <= 6]
    assert path.read_text() == "".join(map(line, kept)) + line(4, "eval")
    assert [other.name for other in tmp_path.iterdir()] == [LOG]


def test_a_gap_is_reported_at_each_resume_and_noted_once(finished):
    reports: list[str] = []
    path = finished / LOG
    train(tiny(), options_for(finished, 4, resume=True), observers=[JsonlLog(reports.append)])
    assert (reports, '"gap"' in path.read_text()) == ([], False)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], *lines[2:]]))
    for steps in (5, 6):
        train(tiny(), options_for(finished, steps, resume=True), observers=[JsonlLog(reports.append)])
    assert reports == [f"{path} has no line of step 2; the remaining lines are kept"] * 2
    entries = [json.loads(one) for one in path.read_text().splitlines()]
    assert [one["step"] for one in entries if one["kind"] == "step"] == [1, 3, 4, 5, 6]
    assert [one["step"] for one in entries if one["kind"] == "gap"] == [4]


def test_a_line_that_is_no_log_line_is_refused_with_its_number(finished):
    path = finished / LOG
    for foreign in ('{"kind": "step", "st\n', "# my notes\n"):
        path.write_text(line(1) + foreign + line(3))
        before = path.read_bytes()
        with pytest.raises(InputError, match=r"log\.jsonl:2: the line is not what trainfit wrote"):
            train(tiny(), options_for(finished, 4, resume=True), observers=[JsonlLog()])
        assert path.read_bytes() == before


@pytest.mark.gpu
def test_ten_and_ten_are_twenty_on_a_gpu(tmp_path):
    size = ("batch.seq=512", "model.config.max_position_embeddings=512", "model.config.hidden_size=128")
    recipe, more = tiny("precision=bf16", *size), {"data": SyntheticData(num_documents=400)}
    straight = train(recipe, options_for(tmp_path / "straight", 20, **more))
    first = train(recipe, options_for(tmp_path / "broken", 20, **more), observers=[Listener(stop_at(10))])
    second = train(recipe, options_for(tmp_path / "broken", 20, resume=True, **more))
    assert first.losses + second.losses == straight.losses
    assert straight.peak_memory_is == "cuda-allocated"


def test_a_run_of_a_version_with_fewer_fields_of_recipes_is_resumed(tmp_path: Path) -> None:
    options = options_for(tmp_path / "run", 3)
    older = folder.describe(tiny(), options)
    del older["recipe"]["loss_terms"], older["recipe"]["optimizer"]["clip_norm"]
    folder._refuse_difference(older, folder.describe(tiny(), options))
    with pytest.raises(InputError, match=r"optimizer\.clip_norm = 1\.0: the run was started with None"):
        folder._refuse_difference(older, folder.describe(tiny("optimizer.clip_norm=1.0"), options))
