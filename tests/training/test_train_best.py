"""The best checkpoint, early ends, epochs, and evaluations of more sequences than a step."""

import json

import pytest

from chat_data import MESSAGES, PLAIN, saved_tokenizer, written
from tiny_training import Listener, options_for, stop_at, tiny
from trainfit.prediction.evaluation import evaluation_peak
from trainfit.prediction.predict import predict
from trainfit.spec.data import Data
from trainfit.spec.errors import InputError
from trainfit.training import durable, session
from trainfit.training.folder import best_checkpoint, existing
from trainfit.training.loop import train
from trainfit.training.options import train_options

EVALUATION = session.Session._evaluation


def losses_of(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Let the evaluations of a run find these losses, one after the other."""
    left = iter(losses)

    def found(self, stop):
        return EVALUATION(self, stop).model_copy(update={"loss": next(left)})

    monkeypatch.setattr(session.Session, "_evaluation", found)


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path, monkeypatch):
    losses_of(monkeypatch, [3.0, 2.0, 4.0, 5.0, 6.0])
    options = options_for(tmp_path / "run", 5, eval_every=1, save_every=1, keep=1, keep_best=True)
    train(tiny(), options)
    kept = [path.name for path in existing(tmp_path / "run" / "checkpoints")]
    assert kept == ["step-00000002", "step-00000005"]
    assert best_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "step-00000002"
    best = json.loads((tmp_path / "run" / "best.json").read_text())
    assert (best["step"], best["loss"]) == (2, 2.0)
    (tmp_path / "run" / "best.json").write_text('{"checkpoint": "../x"}')
    with pytest.raises(InputError, match="names no checkpoint"):
        best_checkpoint(tmp_path / "run")


def test_a_run_that_dies_while_it_removes_the_old_best_names_the_new_one(tmp_path, monkeypatch):
    losses_of(monkeypatch, [3.0, 2.0, 4.0])

    def die(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(durable, "remove_folder", die)
    options = options_for(tmp_path / "run", 3, eval_every=1, save_every=1, keep=1, keep_best=True)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), options)
    assert best_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "step-00000002"


def test_patience_counts_over_a_stop(tmp_path, monkeypatch):
    """A resumed run ends where the unbroken one does."""
    losses = [3.0, 2.0, 2.5, 2.0, 9.0]
    common = {"eval_every": 1, "keep_best": True, "patience": 2}
    losses_of(monkeypatch, losses)
    whole = train(tiny(), options_for(tmp_path / "whole", 9, **common))
    assert (whole.status, whole.steps, whole.exit_code) == ("done", 4, 0)
    assert "no better than the loss 2.0000 of step 2" in whole.message
    losses_of(monkeypatch, losses)
    out = tmp_path / "stopped"
    assert train(tiny(), options_for(out, 9, **common), observers=[Listener(stop_at(3))]).status == "stopped"
    losses_of(monkeypatch, losses[2:])
    resumed = train(tiny(), options_for(out, 9, **common, resume=True))
    assert (resumed.status, resumed.steps) == ("done", 4)
    losses_of(monkeypatch, losses[4:])
    assert train(tiny(), options_for(out, 9, **common, resume=True)).steps == 4, "it has ended"


def test_epochs_become_steps_once_the_data_is_read(tmp_path):
    listener = Listener()
    options = options_for(tmp_path / "run", 1, epochs=0.1, schedule="cosine", warmup_ratio=0.1)
    summary = train(tiny(), options, observers=[listener])
    data = listener.run.data
    assert data is not None
    assert summary.steps == data.steps_of(0.1) > 1
    assert listener.steps[-1].epoch == pytest.approx(0.1, abs=1 / data.epoch_steps)
    with pytest.raises(InputError, match="keep one of them"):
        train_options(None, Data(), out="x", steps=3, epochs=1.0)


def test_an_evaluation_of_more_sequences_changes_no_result(tmp_path):
    one = train(tiny(), options_for(tmp_path / "one", 1)).evaluations
    many = train(tiny(), options_for(tmp_path / "many", 1, eval_batch=8)).evaluations
    assert many[0].loss == pytest.approx(one[0].loss, rel=1e-5)


@pytest.mark.parametrize("count", [1, 2])
def test_the_peak_of_an_evaluation_is_predicted(count: int):
    """Of as many sequences as a step it is lower, as nothing is saved for a backward."""
    recipe = tiny("hardware.gpu=h100-sxm", "batch.micro=2", f"hardware.count={count}")
    small, large = evaluation_peak(recipe, 2), evaluation_peak(recipe, 64)
    step = predict(recipe).peak_allocated_bytes
    assert small.step_allocated_bytes == large.step_allocated_bytes == step
    assert small.allocated_bytes < step < large.allocated_bytes
    logits = 62 * 32 * 384 * 4
    assert large.allocated_bytes - small.allocated_bytes > logits


def test_conversations_apart_resume_bit_for_bit(tmp_path):
    """Labels, position ids and weights of micro-batches are functions of the step, too."""
    tokenizer = saved_tokenizer(tmp_path / "tokenizer", PLAIN)
    answers = [{**MESSAGES[1], "content": "x " * number} for number in range(1, 30)]
    rows = [{"messages": [MESSAGES[0], answer, *MESSAGES[2:]]} for answer in answers]
    common = {"data": written(tmp_path / "rows.jsonl", rows), "tokenizer": tokenizer, "eval_fraction": 0.0}
    recipe = tiny("data.pack=documents", "batch.micro=2", "batch.accumulate=2", "batch.seq=48")
    whole = train(recipe, options_for(tmp_path / "whole", 6, **common)).losses
    out = tmp_path / "parts"
    first = train(recipe, options_for(out, 6, **common), observers=[Listener(stop_at(3))])
    assert first.status == "stopped"
    rest = train(recipe, options_for(out, 6, **common, resume=True))
    assert first.losses + rest.losses == whole
    with pytest.raises(InputError, match=r"data\.pack = true: the run was started with 'documents'"):
        train(recipe.model_copy(update={"data": Data()}), options_for(out, 7, **common, resume=True))


def test_a_cosine_of_an_older_version_is_not_resumed(tmp_path):
    """It ended at a tenth of the rate; its losses would differ from those of the unbroken run."""
    options = options_for(tmp_path, 4, schedule="cosine")
    train(tiny(), options, observers=[Listener(stop_at(2))])
    (newest,) = existing(tmp_path / "checkpoints")
    for folder in (tmp_path, newest):
        run = json.loads((folder / "run.json").read_text())
        newer = ("min_lr_share", "warmup_ratio", "eval_batch", "keep_best", "patience", "epochs", "eval_data")
        run["options"] = {name: one for name, one in run["options"].items() if name not in newer}
        durable.write_json(folder / "run.json", run)
    (newest / durable.MANIFEST).unlink()
    durable._seal(newest)
    with pytest.raises(InputError, match="cosine of an older version"):
        train(tiny(), options.model_copy(update={"resume": True}))
