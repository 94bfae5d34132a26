"""``train`` of a policy: its steps, logs, resume, signals and refusals."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

import rank_policies
from rank_processes import Ranks
from tiny_policies import DIGITS, GRPO, MODEL, options_for, policy, rollouts_in, trained
from tiny_training import Listener, losses_in_log, stop_at
from trainfit.api.exports import export
from trainfit.cli.main import main
from trainfit.rl.answers import write_tokenizer
from trainfit.rl.environments.load import Maker
from trainfit.rl.environments.pool import Pool
from trainfit.rl.loop import Rollouts, rollouts_of
from trainfit.rl.rollout.generate import Generator
from trainfit.spec.errors import InputError
from trainfit.spec.stop import Stopped
from trainfit.training import durable
from trainfit.training.log import TensorBoard
from trainfit.training.loop import train

LORA = {"adapter": {"kind": "lora", "rank": 4}, "objective": {**GRPO, "reference": "adapter-off"}}


def test_logs_of_rollouts_and_steps(tmp_path: Path) -> None:
    listener = Listener()
    summary = trained(policy(), options_for(tmp_path, 5, eval_every=2), listener)
    assert (summary.status, summary.steps) == ("done", 5)
    rollouts = rollouts_in(tmp_path)
    assert [one["step"] for one in rollouts] == [1, 3, 5]
    for one in rollouts:
        assert one["completions"] == 8
        assert one["reward"] == pytest.approx(sum(one["parts"].values()), abs=1e-5)
        assert 0 < one["log_difference_mean"] <= one["log_difference_max"] < 1e-4
        assert 1 <= one["tokens_mean"] <= one["tokens_max"] <= 6
        assert one["prompt_tokens_mean"] == 2
    steps = listener.steps
    # A rollout's first update is of the model that generated, the second of one that has moved.
    assert steps[0].kl == pytest.approx(0, abs=1e-5)
    assert steps[1].kl is not None
    assert steps[1].kl > 1e-4
    assert sum(one.reward or 0 for one in steps[:2]) / 2 == pytest.approx(rollouts[0]["reward"], abs=1e-5)
    evaluations = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    rewards = [line for line in evaluations if line["kind"] == "eval"]
    assert [line["step"] for line in rewards] == [2, 4, 5]
    assert summary.eval_reward == rewards[-1]["reward"]
    assert set(rewards[0]["parts"]) == {"short", "letters"}


@pytest.mark.parametrize("stop", [2, 3], ids=["between rollouts", "within a rollout"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        LORA,
        {"objective": {**GRPO, "name": "ppo", "group": 1, "prompts": 8, "kl": 0.0, "per": "sequence"}},
    ],
    ids=["copy", "adapter-off", "ppo"],
)
def test_a_resumed_run_is_the_unbroken_one_to_the_last_bit(
    tmp_path: Path, stop: int, fields: dict[str, Any]
) -> None:
    recipe = policy(**fields)
    straight = trained(recipe, options_for(tmp_path / "straight", 6))
    first = trained(recipe, options_for(tmp_path / "broken", 6), Listener(stop_at(stop)))
    assert (first.status, first.exit_code, first.steps) == ("stopped", 75, stop)
    second = trained(recipe, options_for(tmp_path / "broken", 6, resume=True))
    assert (second.status, second.first_step) == ("done", stop)
    assert first.losses + second.losses == straight.losses
    assert second.eval_reward == straight.eval_reward
    assert rollouts_in(tmp_path / "broken") == rollouts_in(tmp_path / "straight")
    assert losses_in_log(tmp_path / "broken") == losses_in_log(tmp_path / "straight")


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{}, {**LORA, "quantize": "nf4"}], ids=["full", "qlora"])
def test_a_resumed_run_on_a_gpu_is_the_unbroken_one(tmp_path: Path, fields: dict[str, Any]) -> None:
    """With recorded decoding steps, whose weights change in place."""
    more: dict[str, Any] = {"precision": "bf16", "hardware": {"gpu": "h100"}}
    wide = {"model": {"config": {**MODEL, "hidden_size": 128, "intermediate_size": 256}}}
    recipe = policy(**{**fields, **more, **wide})
    straight = trained(recipe, options_for(tmp_path / "straight", 6, device="cuda"))
    options = options_for(tmp_path / "broken", 6, device="cuda")
    first = trained(recipe, options, Listener(stop_at(3)))
    second = trained(recipe, options.model_copy(update={"resume": True}))
    assert first.losses + second.losses == straight.losses
    assert rollouts_in(tmp_path / "broken") == rollouts_in(tmp_path / "straight")
    assert all(one["log_difference_max"] < 0.5 for one in rollouts_in(tmp_path / "broken"))


@pytest.mark.parametrize("phase", ["rollout", "rewards", "scoring", "log"])
def test_a_signal_in_any_phase_saves_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """In the second rollout, after two steps of which no checkpoint was written."""
    recipe = policy()
    straight = trained(recipe, options_for(tmp_path / "straight", 4))
    owner, name = {
        "rollout": (Generator, "_step"), "rewards": (Pool, "rewards"), "scoring": (Rollouts, "_score"),
        "log": (Rollouts, "_metrics"),
    }[phase]  # fmt: skip
    plain, sent = getattr(owner, name), []

    def signalled(self: Any, *arguments: Any) -> Any:
        if (tmp_path / "broken" / "rollouts.jsonl").read_text() and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return plain(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, signalled)
        first = trained(recipe, options_for(tmp_path / "broken", 4))
    assert (first.status, first.exit_code, first.steps) == ("stopped", 75, 2)
    assert sent
    assert len(rollouts_in(tmp_path / "broken")) == (2 if phase == "log" else 1)
    second = trained(recipe, options_for(tmp_path / "broken", 4, resume=True))
    assert first.losses + second.losses == straight.losses
    assert rollouts_in(tmp_path / "broken") == rollouts_in(tmp_path / "straight")


def test_a_signal_before_the_first_step_has_nothing_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Pool.rewards

    def signalled(self: Pool, *arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *arguments)

    monkeypatch.setattr(Pool, "rewards", signalled)
    summary = trained(policy(), options_for(tmp_path, 4))
    assert (summary.status, summary.exit_code, summary.checkpoint) == ("stopped", 75, None)


def test_workers_and_their_end(tmp_path: Path) -> None:
    straight = trained(policy(), options_for(tmp_path / "here", 2))
    there = trained(policy(objective={**GRPO, "workers": 1}), options_for(tmp_path / "there", 2))
    assert there.losses == straight.losses
    assert rollouts_in(tmp_path / "there") == rollouts_in(tmp_path / "here")


def sealed(folder: Path) -> None:
    """Write the manifest of what now lies in the folder."""
    (folder / durable.MANIFEST).unlink(missing_ok=True)
    durable._seal(folder)


FORGED: list[tuple[str, Any]] = [
    ("input_ids", lambda x: x + 300),
    ("old", lambda x: x * float("nan")),
    ("lengths", lambda x: x + 50),
    ("prompts", lambda x: x * 0),
    ("rewards", lambda x: x[:-1]),
    ("advantages", lambda x: x.double()),
]


def test_a_forged_queue_is_refused(tmp_path: Path) -> None:
    trained(policy(), options_for(tmp_path, 3))
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    (file,) = checkpoint.glob("queue-*.safetensors")
    content = load_file(file)
    for name, change in FORGED:
        save_file({**content, name: change(content[name]).contiguous()}, file)
        sealed(checkpoint)
        with pytest.raises(InputError, match="the checkpoint's queue is not this run's") as refused:
            trained(policy(), options_for(tmp_path, 4, resume=True))
        assert refused.value.field == name
    file.unlink()
    sealed(checkpoint)
    with pytest.raises(InputError, match="is in only one of both"):
        trained(policy(), options_for(tmp_path, 4, resume=True))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"batch": {"accumulate": 3}}, r"batch.accumulate = 3: an update has 4 .* is 6 .*batch.accumulate: 2"),
    ({"batch": {"micro": 3, "accumulate": 1}}, r"write batch.micro: 4"),
    ({"batch": {"micro": 3, "accumulate": 3}}, r"use a batch.micro that divides them"),
    ({"model": {"implementation": "hf"}}, "native decoder"),
]


@pytest.mark.parametrize(("fields", "says"), REFUSED, ids=[says[:20] for _, says in REFUSED])
def test_recipes_that_cannot_roll_out(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        rollouts_of(policy(**fields))


def test_a_policy_takes_no_data(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a text")
    for more in ({"data": {"kind": "text", "path": str(text)}}, {"epochs": 1.0}):
        with pytest.raises(InputError, match="a policy"):
            trained(policy(), options_for(tmp_path / "run", 2, **more))
    with pytest.raises(InputError, match="no rewards"):
        train(policy(), options_for(tmp_path / "run", 2))


PROMPT = "class Task:\n  def prompt(self, n): return {}\n  def reward(self, n, x): return {}\n"
BROKEN = {
    "none": ("", "has no class Task"),
    "syntax": ("class Task(:", r"importing it raised SyntaxError.*line 1"),
    "raises": ("class Task:\n  def __init__(self):\n    1 / 0", r"ZeroDivisionError.*task\.py, line 3"),
    "methods": ("class Task:\n  def prompt(self, number): return ''", "has no method reward"),
    "prompt": (PROMPT.format("5", "1"), "not text"),
    "empty": (PROMPT.format("''", "1"), r"prompt\(\d+\) has no tokens"),
    "reward": (PROMPT.format("'1'", "None"), r"reward\(0, .*TypeError"),
    "nan": (PROMPT.format("'1'", "float('nan')"), "not a number below"),
    "large": (PROMPT.format("'1'", "1e39"), "not a number below"),
    "exits": (PROMPT.format("'1'", "__import__('sys').exit(3)"), r"reward\(0, .*SystemExit"),
    "no class": ("Task = 5", "has no class Task"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_environments_that_fail_are_named(tmp_path: Path, case: str) -> None:
    text, says = BROKEN[case]
    (tmp_path / "task.py").write_text(text)
    objective = {**GRPO, "environment": f"{tmp_path / 'task.py'}:Task"}
    with pytest.raises(InputError, match=says):
        trained(policy(objective=objective), options_for(tmp_path / "run", 2))


LATE = """
class Task:
    def prompt(self, number):
        return ("ab", "cd")[number % 2]

    def reward(self, number, completion):
        if {condition}:
            raise LookupError("an unforeseen answer")
        return len(completion) % 3
"""


@pytest.mark.parametrize(
    "condition", ["2 <= number < 2**30", "number >= 2**30"], ids=["rollout", "last evaluation"]
)
def test_an_error_of_the_environment_loses_no_step(tmp_path: Path, condition: str) -> None:
    file = tmp_path / "task.py"
    file.write_text(LATE.format(condition=condition))
    recipe = policy(objective={**GRPO, "environment": f"{file}:Task"})
    out = tmp_path / "run"
    with pytest.raises(InputError, match="LookupError: an unforeseen answer") as error:
        trained(recipe, options_for(out, 4))
    done = 4 if ">=" in condition else 2
    assert error.value.remedy.endswith(f"the last good checkpoint is {out}/checkpoints/step-{done:08d}")
    file.write_text(LATE.format(condition=False))
    second = trained(recipe, options_for(out, 5, resume=True))
    assert (second.status, second.first_step) == ("done", done)
    assert second.run.notes[-1].startswith("the environment's file has changed")


def test_held_out_tasks_are_looked_at_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        "class Task:\n  def prompt(self, n): return 'abc'[n]\n  def reward(self, n, x): return 0\n"
    )
    objective = {**GRPO, "environment": f"{tmp_path / 'task.py'}:Task"}
    with pytest.raises(InputError, match=r"IndexError.*numbered from 1,073,741,824 on") as refused:
        trained(policy(objective=objective), options_for(tmp_path / "run", 2))
    assert refused.value.field == "objective.environment"
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_signal_ends_the_wait_for_rewards() -> None:
    answered = list[int]()

    class Slow:
        def prompt(self, number: int) -> str:
            return "a"

        def reward(self, number: int, completion: str) -> float:
            answered.append(number)
            return 0.0

    def wait() -> None:
        if len(answered) == 2:
            raise Stopped("SIGTERM")

    with Pool(Slow, 0) as pool, pytest.raises(Stopped):
        pool.rewards(range(5), ["b"] * 5, wait)
    assert answered == [0, 1]


def test_trained_weights_need_their_tokenizer(tmp_path: Path) -> None:
    options = options_for(tmp_path / "run", 2)
    with pytest.raises(InputError, match="give --tokenizer FOLDER") as refused:
        write_tokenizer(tmp_path / "data", options, 257, weights="a-folder")
    assert refused.value.field == "tokenizer"
    assert not (tmp_path / "data").exists()


def test_the_environment_a_recipe_names() -> None:
    made: Any = Maker("arithmetic", {"largest": 3}, 5)()
    assert (made.largest, made.seed) == (3, 5)
    assert Maker("arithmetic", {"seed": 2}, 5)().seed == 2  # type: ignore[attr-defined]
    assert Maker("arithmetic", {}, 0).digest() == "" != Maker(f"{DIGITS}:Digits", {}, 0).digest()
    for name, arguments, says in (
        ("chess", {}, "no such environment"), ("nowhere.py:Task", {}, "no such file"),
        ("arithmetic", {"digits": 3}, "it takes largest, seed"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=says):
            Maker(name, arguments, 0)()


def test_long_prompts_keep_their_ends(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(PROMPT.format("'a long prompt ' + str(n % 10)", "len(x)"))
    trained(
        policy(objective={**GRPO, "environment": f"{tmp_path / 'task.py'}:Task"}),
        options_for(tmp_path / "run", 1),
    )
    (line,) = rollouts_in(tmp_path / "run")
    assert (line["prompts_cut"], line["prompt_tokens_mean"]) == (1, 8)
    assert list(line["parts"]) == ["reward"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as running:
        yield running


@pytest.mark.parametrize(
    "fields",
    [{}, {**LORA, "quantize": "nf4"}, {"parallel": {"strategy": "ddp"}}],
    ids=["fsdp", "qlora on shards", "ddp"],
)
def test_two_ranks_train_as_one_and_go_on_from_each_other(
    ranks: Ranks, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Stopped within a rollout, whose completions are divided anew."""
    alone = {name: value for name, value in fields.items() if name != "parallel"}
    one = rank_policies.trained_policy(tmp_path / "one", 6, alone, save_every=3, keep=9)
    both = {**fields, "hardware": {"gpu": "h200", "count": 2}, "batch": {"accumulate": 1}}
    two, other = ranks.run(rank_policies.trained_policy, tmp_path / "two", 3, both)
    assert two["losses"] == other["losses"] == pytest.approx(one["losses"][:3], abs=1e-4)
    for line, expected in zip(two["rollouts"], one["rollouts"], strict=False):
        assert line["reward"] == pytest.approx(expected["reward"], abs=1e-5)
        assert line["tokens_mean"] == expected["tokens_mean"]
        assert line["log_difference_max"] < 1e-3
    more = rank_policies.trained_policy(tmp_path / "two", 5, alone, resume=True)
    assert more["losses"] == pytest.approx(one["losses"][3:5], abs=1e-4)
    last, _ = ranks.run(rank_policies.trained_policy, tmp_path / "two", 6, both, resume=True)
    assert last["losses"] == pytest.approx(one["losses"][5:], abs=1e-4)
    assert last["reward"] == pytest.approx(one["reward"], abs=1e-4)


def test_ranks_stop_together_in_a_rollout(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1 alone gets the signal, while it generates the second rollout."""
    fields = {"hardware": {"gpu": "h200", "count": 2}, "batch": {"accumulate": 1}}
    whole, _ = ranks.run(rank_policies.trained_policy, tmp_path / "whole", 4, fields)
    first, other = ranks.run(rank_policies.trained_policy, tmp_path / "run", 4, fields, signal_in=2)
    assert (first["status"], first["steps"]) == (other["status"], other["steps"]) == ("stopped", 2)
    # Rank 1 gave its rollout up at the next decoding step; rank 0, without a signal, ended its own.
    assert other["generated"][-1] == 0 < first["generated"][-1] == first["generated"][0]
    second, _ = ranks.run(rank_policies.trained_policy, tmp_path / "run", 4, fields, resume=True)
    assert first["losses"] + second["losses"] == whole["losses"]


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment and recipe, by the command line, in the folder of both files."""
    page = (Path(__file__).parents[2] / "docs/guide/reinforcement-learning.md").read_text()
    for kind, file in (("python", "vowels.py"), ("yaml", "vowels.yaml")):
        (text,) = re.findall(rf"^```{kind}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    words = ["train", "vowels.yaml", "--steps", "2", "--out", "runs/vowels", "--no-tensorboard", "--force"]
    assert main(words) == 0
    assert [one["step"] for one in rollouts_in(tmp_path / "runs" / "vowels")] == [1, 2]


def test_the_best_checkpoint_has_most_reward_and_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    out = tmp_path / "run"
    summary = trained(policy(), options_for(out, 5, eval_every=1, keep_best=True, keep=1), TensorBoard())
    best = max(summary.evaluations, key=lambda one: (one.reward or 0, -one.step))
    assert json.loads((out / "best.json").read_text())["step"] == best.step
    export(out, tmp_path / "model")
    assert "held-out prompts" in (tmp_path / "model" / "README.md").read_text()
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_a_dry_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(policy().content()))
    assert main(["train", str(tmp_path / "recipe.yaml"), "--dry-run"]) == 65
    assert "its own completions" in capsys.readouterr().err
