"""``trainfit evaluate``: rewards of held-out tasks, and games."""

import json
from pathlib import Path

import pytest
import yaml

from tiny_policies import DIGITS, GRPO, options_for, policy, trained
from trainfit.cli.main import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, the last within a rollout, and its recipe as a file."""
    out = tmp_path_factory.mktemp("policy")
    recipe = policy(objective={**GRPO, "environment": f"{DIGITS}:Higher"})
    trained(recipe, options_for(out / "run", 3, eval_sequences=20))
    (out / "recipe.yaml").write_text(yaml.safe_dump(recipe.content()))
    return out


def test_a_run_has_the_reward_that_training_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run / "run"), "--prompts", "20", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    logged = [json.loads(line) for line in (run / "run" / "log.jsonl").read_text().splitlines()][-1]
    assert (logged["kind"], logged["step"], found["step"]) == ("eval", 3, 3)
    assert found["reward"] == pytest.approx(logged["reward"])
    assert found["parts"] == pytest.approx(logged["parts"])
    assert found["games"] is None


def test_a_recipe_and_its_games(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", str(run / "recipe.yaml"), "--prompts", "8", "--games", "5", "--device", "cpu"]
    assert main([*words, "--temperature", "0", "--limit", "30"]) == 0
    out = capsys.readouterr().out
    assert "8 held-out tasks at temperature 0" in out
    assert "5 games of at most 30 moves" in out
    assert "letters: mean" in out
    assert main([*words, "--json"]) == 0
    games = json.loads(capsys.readouterr().out)["games"]
    assert games["won"] + games["drawn"] + games["lost"] == pytest.approx(1)
    assert games["drawn"] >= 0.2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tiny-cpu"], "no environment to evaluate in"),
        (["RUN", "--seq", "32"], "a run has its own recipe"),
        (["RECIPE", "--set", f"objective.environment={DIGITS}:Digits", "--games", "2"], "plays no games"),
    ],
)
def test_what_is_refused(run: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    places = {"RUN": str(run / "run"), "RECIPE": str(run / "recipe.yaml")}
    assert main(["evaluate", *(places.get(word, word) for word in words)]) == 65
    assert says in capsys.readouterr().err
