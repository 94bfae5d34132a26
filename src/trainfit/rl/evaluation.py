"""Evaluate a policy: the rewards of its answers to held-out tasks, and games against the environment."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from trainfit.rl.answers import HELD_OUT, Answers, PolicyTokenizer, write_tokenizer
from trainfit.rl.environments.load import Maker
from trainfit.rl.environments.pool import Pool
from trainfit.rl.environments.protocol import Games, Result
from trainfit.rl.loop import parts_of
from trainfit.rl.rollout import phases
from trainfit.spec.errors import InputError
from trainfit.spec.objective import Policy
from trainfit.spec.recipe import Parallel, Recipe
from trainfit.spec.value import Count, Seconds, Share, Value
from trainfit.step import assemble, vocabulary
from trainfit.training import checkpoint
from trainfit.training.options import TrainOptions

PLAYED = HELD_OUT * 2
"""Number of the first answer in a game, on which its noise depends."""


class GamesPlayed(Value):
    """Results of games.

    Attributes:
        won, drawn, lost: shares of the games; too long is drawn.
        illegal: share that the model lost by an answer that is no legal move.
        moves_median: of both sides.
    """

    games: Count
    limit: Count
    won: Share
    drawn: Share
    lost: Share
    illegal: Share
    moves_median: float
    seconds: Seconds


class PolicyEvaluation(Value):
    """A policy's answers to held-out tasks.

    Attributes:
        deviation: standard deviation of the rewards.
        parts: mean of each part of the reward; ``shares``: share of answers where it is above 0.
        tokens_mean, cut_share: length of the answers; share that ``max_new`` ended.
        games: None: none was played.
    """

    environment: str
    temperature: float
    prompts: Count
    reward: float
    deviation: float
    parts: dict[str, float]
    shares: dict[str, float]
    tokens_mean: float
    cut_share: Share
    seconds: Seconds
    step: Count | None = None  # Of the run's checkpoint; None: the recipe's weights
    games: GamesPlayed | None = None


def evaluate(
    recipe: Recipe,
    options: TrainOptions,
    *,
    prompts: int,
    games: int = 0,
    limit: int = 400,
    temperature: float | None = None,
    saved: tuple[Path, Path] | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> PolicyEvaluation:
    """Evaluate a recipe's policy on one device.

    Args:
        options: of which device, tokenizer and chat template are read.
        prompts: number of held-out tasks, answered once each.
        games: number of games, of at most ``limit`` moves; they need an environment with ``games``.
        temperature: None: the recipe's.
        saved: checkpoint, and folder of the run's tokenizer; None: the recipe's ``model.weights``.

    Raises:
        InputError: the recipe has no policy, or its environment no games.
    """
    policy = recipe.objective
    if not isinstance(policy, Policy):
        remedy = "name a recipe with objective: grpo or ppo, or the folder of its run"
        raise InputError("no environment to evaluate in", remedy, field="objective.name", value=policy.name)
    phases.check(recipe)
    hardware = recipe.hardware.model_copy(update={"count": 1, "nodes": None})
    one = {"hardware": hardware, "parallel": Parallel()}
    recipe = recipe.without_open_fields().model_copy(update=one)
    cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    step = assemble(recipe, torch.device("cuda" if cuda else "cpu"), reads_weights=saved is None)
    done = None
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "data"
        if saved is None:
            write_tokenizer(place, options, vocabulary(step.model), weights=recipe.model.weights)
        else:
            done, place = checkpoint.load(saved[0], step).step, saved[1]
        tokenizer = PolicyTokenizer.in_folder(place)
    maker = Maker.of(policy, recipe.seed)
    environment = maker()
    if games and not isinstance(environment, Games):
        problem = f"{policy.environment} plays no games"
        raise InputError(problem, "leave --games out, or add a method games", field="objective.environment")
    with Pool(maker, policy.workers) as pool:
        answers = Answers(step, tokenizer, pool, temperature=temperature)
        on_phase(f"answering {prompts:,} held-out tasks")
        found = _answered(answers, recipe, prompts, temperature, done)
        if games and isinstance(environment, Games):
            on_phase(f"playing {games:,} games")
            found = found.model_copy(update={"games": _played(answers, environment, games, limit)})
    return found


def _answered(
    answers: Answers, recipe: Recipe, prompts: int, temperature: float | None, step: int | None
) -> PolicyEvaluation:
    policy, start_s = phases.policy_of(recipe), time.perf_counter()
    every, _ = answers.of_tasks(range(HELD_OUT, HELD_OUT + prompts), 1, _go_on)
    rewards = [sum(one.reward.values()) for one in every]
    return PolicyEvaluation(
        environment=policy.environment,
        temperature=policy.rollout.temperature if temperature is None else temperature,
        prompts=prompts,
        reward=statistics.fmean(rewards),
        deviation=statistics.pstdev(rewards),
        **parts_of([one.reward for one in every]),
        tokens_mean=statistics.fmean(len(one.completion.tokens) for one in every),
        cut_share=sum(not one.completion.stopped for one in every) / prompts,
        seconds=time.perf_counter() - start_s,
        step=step,
    )


def _played(answers: Answers, environment: Games, games: int, limit: int) -> GamesPlayed:
    start_s, first = time.perf_counter(), PLAYED
    playing = environment.games(games, limit)
    results: list[Result] = []
    try:
        prompts = next(playing)
        while True:
            texts = answers.of_texts(prompts, first, _go_on)
            first += len(prompts)
            prompts = playing.send(texts)
    except StopIteration as ended:
        results = list(ended.value)

    def share(is_so: Callable[[Result], bool]) -> float:
        return sum(map(is_so, results)) / len(results)

    return GamesPlayed(
        games=len(results),
        limit=limit,
        won=share(lambda one: one.outcome > 0),
        drawn=share(lambda one: one.outcome == 0),
        lost=share(lambda one: one.outcome < 0),
        illegal=share(lambda one: one.illegal),
        moves_median=statistics.median(one.moves for one in results),
        seconds=time.perf_counter() - start_s,
    )


def _go_on(phase: str, together: bool) -> None:
    """Let a signal end an evaluation at once: there is nothing to save."""
