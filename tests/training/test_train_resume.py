"""A resumed run has the losses of an unbroken one to the last bit, or is refused."""

import signal
from pathlib import Path

import pytest

from tiny_training import GPT2, LLAMA, Listener, asked, losses_in_log, stop_at, tiny
from trainfit.spec.errors import InputError
from trainfit.training.folder import locked
from trainfit.training.log import JsonlLog, TensorBoard
from trainfit.training.loop import train
from trainfit.training.options import SyntheticData


@pytest.fixture
def finished(tmp_path) -> Path:
    train(tiny(), asked(tmp_path / "run", 3))
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (LLAMA, ()),
        (LLAMA, ("precision=amp-bf16", "batch.accumulate=2")),
        (GPT2, ("attention=eager",)),
        (LLAMA, ("adapter={kind: lora, rank: 4, dropout: 0.1}", "precision=bf16")),
    ],
    ids=["llama", "amp-accumulate", "gpt2-dropout", "lora-dropout"],
)
def test_ten_steps_and_ten_more_are_twenty_to_the_last_bit(tmp_path, config, settings):
    recipe = tiny(*settings, "optimizer.clip_norm=1.0", config=config)
    more = {"schedule": "cosine", "warmup_steps": 3, "eval_every": 4}
    straight = train(recipe, asked(tmp_path / "straight", 20, **more), observers=[JsonlLog()])
    first = train(
        recipe, asked(tmp_path / "broken", 20, **more), observers=[Listener(stop_at(10)), JsonlLog()]
    )
    assert (first.status, first.exit_code, first.steps) == ("stopped", 75, 10)
    second = train(recipe, asked(tmp_path / "broken", 20, resume=True, **more), observers=[JsonlLog()])
    assert (second.status, second.exit_code, second.first_step) == ("done", 0, 10)
    assert first.losses + second.losses == straight.losses
    assert second.eval_perplexity == straight.eval_perplexity
    assert losses_in_log(tmp_path / "broken") == dict(enumerate(straight.losses, 1))
    assert losses_in_log(tmp_path / "straight") == dict(enumerate(straight.losses, 1))


def test_a_killed_run_goes_on_from_its_checkpoint_and_its_log_has_no_step_twice(tmp_path, worker):
    recipe = tiny()
    straight = train(recipe, asked(tmp_path / "straight", 12))
    killed = asked(tmp_path / "killed", 12, save_every=4)
    code = (
        "import sys, signal; from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1] / 'helpers')!r}); import tiny_training as t\n"
        "from trainfit.training.log import JsonlLog; from trainfit.training.loop import train\n"
        f"o = t.asked(Path({killed.out!r}), 12, save_every=4)\n"
        "train(t.tiny(), o, observers=[JsonlLog(), t.Listener(t.stop_at(10, signal.SIGKILL))])"
    )
    assert worker.run(first=code, memory_bytes=None).code == -signal.SIGKILL
    assert len(losses_in_log(killed.folder)) == 10
    with (killed.folder / "log.jsonl").open("a") as log:
        log.write('{"kind": "step", "st')  # What a kill in the middle of a write leaves.
    resumed = train(recipe, killed.model_copy(update={"resume": True}), observers=[JsonlLog()])
    assert resumed.first_step == 8
    assert resumed.losses == straight.losses[8:]
    assert losses_in_log(killed.folder) == dict(enumerate(straight.losses, 1))


def test_tensorboard_has_the_losses(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = train(tiny(), asked(tmp_path, 6, save_every=2, keep=9), observers=[TensorBoard()])
    for newer in ("step-00000006", "step-00000004"):
        for file in (tmp_path / "checkpoints" / newer).iterdir():
            file.unlink()
        (tmp_path / "checkpoints" / newer).rmdir()
    train(tiny(), asked(tmp_path, 6, resume=True), observers=[TensorBoard()])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [event.step for event in events] == [1, 2, 3, 4, 5, 6], "steps taken again are shown once"
    assert [event.value for event in events] == pytest.approx(first.losses, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "more", "field"),
    [
        (("batch.micro=8",), {}, "batch.micro"),
        (("optimizer.lr=1e-3",), {}, "optimizer.lr"),
        (("seed=1",), {}, "seed"),
        (("model.config.hidden_size=64",), {}, "model.config.hidden_size"),
        ((), {"data": SyntheticData(num_documents=61)}, "data.num_documents"),
        ((), {"warmup_steps": 2}, "warmup_steps"),
    ],
)
def test_a_resumed_run_that_would_be_another_is_refused(finished, settings, more, field):
    with pytest.raises(InputError) as refused:
        train(tiny(*settings), asked(finished, 4, resume=True, **more))
    assert refused.value.field == field


def test_run_settings_may_change_on_resume(finished):
    before = tree(finished)
    summary = train(
        tiny("hardware.gpu=l4", "model.name=other"),
        asked(finished, 3, resume=True, eval_every=1, keep=1, eval_sequences=2),
    )
    assert (summary.status, summary.losses, summary.steps) == ("done", (), 3)
    assert summary.final_loss is not None
    assert summary.evaluations[0].sequences == 2
    assert tree(finished)["checkpoints"] == before["checkpoints"]


def tree(out: Path) -> dict[str, list[str]]:
    return {
        path.name: sorted(child.name for child in path.iterdir()) for path in out.iterdir() if path.is_dir()
    }


def test_a_used_folder_is_refused(finished, tmp_path):
    with pytest.raises(InputError, match="already holds a run"):
        train(tiny(), asked(finished, 5))
    with pytest.raises(InputError, match="already has 3 steps"):
        train(tiny(), asked(finished, 2, resume=True))
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("Call me Ishmael.")
    with pytest.raises(InputError, match=r"chapter1\.txt"):
        train(tiny(), asked(tmp_path / "thesis", 5))
    with pytest.raises(InputError, match="no run to resume"):
        train(tiny(), asked(tmp_path / "empty", 5, resume=True))
    with locked(finished), pytest.raises(InputError, match="another process"):
        train(tiny(), asked(finished, 5, resume=True))


def test_a_damaged_checkpoint_is_refused_even_where_an_older_one_is_whole(tmp_path):
    train(tiny(), asked(tmp_path, 4, save_every=2))
    file = tmp_path / "checkpoints" / "step-00000004" / "optimizer-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match="SHA-256") as refused:
        train(tiny(), asked(tmp_path, 6, resume=True))
    assert refused.value.file == str(file)


def test_a_log_line_of_somebody_else_is_refused(finished):
    (finished / "log.jsonl").write_text('{"kind": "step", "step": 1}\n# my notes\n')
    with pytest.raises(InputError, match=r"log\.jsonl"):
        train(tiny(), asked(finished, 4, resume=True), observers=[JsonlLog()])


@pytest.mark.gpu
def test_ten_and_ten_are_twenty_on_a_gpu(tmp_path):
    recipe = tiny(
        "precision=bf16",
        "batch.seq=512",
        "model.config.max_position_embeddings=512",
        "model.config.hidden_size=128",
    )
    more = {"data": SyntheticData(num_documents=400)}
    straight = train(recipe, asked(tmp_path / "straight", 20, **more))
    first = train(recipe, asked(tmp_path / "broken", 20, **more), observers=[Listener(stop_at(10))])
    second = train(recipe, asked(tmp_path / "broken", 20, resume=True, **more))
    assert first.losses + second.losses == straight.losses
    assert straight.peak_memory_is == "cuda-allocated"
