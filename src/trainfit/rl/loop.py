"""The loop of a policy: rollouts of its own model, their rewards and log-probabilities, and their updates.

``training.session`` runs the steps; this is what it trains on. One rollout gives the completions of
``updates_per_rollout`` steps. Every rank generates a share of them, knows the rewards of all, and scores and
trains on its share of each update.

Tasks, and the noise of sampling, are functions of the recipe's seed and the completion's number, which counts
through the whole run. So a resumed run needs no state of environment and sampler; only completions that were
generated and not yet trained on are in the checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from trainfit.rl.answers import HELD_OUT, Answers, PolicyTokenizer, Sampled, write_tokenizer
from trainfit.rl.environments.load import Maker
from trainfit.rl.environments.pool import Pool
from trainfit.rl.objectives.policy import group_advantages, whitened
from trainfit.rl.queue import Queue
from trainfit.rl.rollout import phases
from trainfit.rl.shares import Share, check_counts
from trainfit.spec.errors import InputError
from trainfit.spec.objective import Policy
from trainfit.spec.recipe import Recipe
from trainfit.step import Batch, Step, vocabulary
from trainfit.training.folder import DATA
from trainfit.training.observer import EvalMetrics, RolloutMetrics
from trainfit.training.options import SyntheticData, TrainOptions
from trainfit.training.ranks.exchange import Ranks
from trainfit.training.rollouts import REWARDS, MakeRollouts, Pause


def rollouts_of(recipe: Recipe) -> MakeRollouts | None:
    """Return what makes the rollouts of a recipe; None: it trains on data.

    Raises:
        InputError: the recipe can be updated, but not generate, or its counts do not agree.
    """
    if not isinstance(recipe.objective, Policy):
        return None
    phases.check(recipe)
    check_counts(recipe)
    return Rollouts


class Rollouts:
    """``training.rollouts.Rollouts`` of a policy."""

    def __init__(self, recipe: Recipe, options: TrainOptions, step: Step, ranks: Ranks):
        """Make the environment, open the tokenizer, and check the data that is not needed."""
        self._recipe, self._step, self._ranks = recipe, step, ranks
        self._policy = policy = phases.policy_of(recipe)
        _refuse_data(options)
        self._vocabulary = vocabulary(step.model)
        place = options.folder / DATA
        weights = recipe.model.weights
        ranks.on_first(lambda: write_tokenizer(place, options, self._vocabulary, weights=weights))
        self._tokens = PolicyTokenizer.in_folder(place)
        maker = Maker.of(policy, recipe.seed)
        self._pool = Pool(maker, policy.workers)
        if options.evaluates:
            self._check_held_out()
        self._answers = Answers(step, self._tokens, self._pool)
        self._share = Share(
            policy.completions, policy.updates_per_rollout, ranks.world_size, ranks.rank, recipe.batch.micro
        )
        self._queue: Queue | None = None
        self._update = 0
        self.tokenizer_tokens = self._tokens.tokenizer.get_vocab_size()
        self.notes: tuple[str, ...] = self._tokens.notes
        self.identity = {REWARDS: digest} if (digest := maker.digest()) else {}
        updates = policy.updates_per_rollout
        self.title = (
            f"{policy.name} on {policy.environment}: {policy.prompts} prompts x {policy.group} completions a "
            f"rollout, {updates} update{'s' * (updates > 1)} each; {self.tokenizer_tokens:,} tokens in the "
            f"tokenizer"
        )

    def _check_held_out(self) -> None:
        """Refuse an environment without held-out tasks before the first step, not after hours."""
        try:
            self._pool.prompts([HELD_OUT])
        except InputError as error:
            remedy = (
                f"held-out tasks are numbered from {HELD_OUT:,} on: take the number modulo the size of a "
                "list, or leave the evaluation out with --eval-fraction 0"
            )
            self._pool.close()
            raise InputError(error.problem, remedy, field=error.field) from None

    def feed(self, steps: range, pause: Pause, on_rollout: Callable[[RolloutMetrics], None]) -> _Feed:
        """Return the micro-batches of these steps."""
        return _Feed(self, steps, pause, on_rollout)

    def batches(self, number: int, pause: Pause, on_rollout: Callable[[RolloutMetrics], None]) -> list[Batch]:
        """Return the micro-batches of step ``number`` (from 0), after a rollout if one is due."""
        rollout, self._update = divmod(number, self._policy.updates_per_rollout)
        if self._queue is None or self._queue.rollout != rollout:
            self._queue, metrics = self._rollout(rollout, number + 1, pause)
            on_rollout(metrics)
        batch = self._recipe.batch
        on_host = self._queue.batches(
            self._policy, self._update, batch.seq, batch.accumulate, bool(self._recipe.compile)
        )
        device = self._step.device
        return [{name: tensor.to(device) for name, tensor in one.items()} for one in on_host]

    def _rollout(self, rollout: int, step: int, pause: Pause) -> tuple[Queue, RolloutMetrics]:
        """Generate, reward and score the completions of a rollout."""
        policy, share = self._policy, self._share
        first, size = rollout * policy.completions, policy.completions // share.ranks
        numbers = range(first + share.rank * size, first + (share.rank + 1) * size)
        mine, times = self._answers.of_tasks(numbers, policy.group, pause)
        following = range(numbers.start + policy.completions, numbers.stop + policy.completions)
        self._answers.begin(following, policy.group)
        every = [one for part in self._ranks.gather(mine) for one in part]
        pause("rewards", True)
        rewards = torch.tensor([sum(one.reward.values()) for one in every], dtype=torch.float32)
        grouped = policy.name == "grpo"
        advantages = group_advantages(rewards, policy.group) if grouped else whitened(rewards)
        prompts, completions = [one.prompt for one in every], [one.completion for one in every]
        queue = Queue.of(rollout, share, prompts, completions, rewards, advantages)
        start_s = time.perf_counter()
        self._score(queue, pause)
        times["scoring"] = time.perf_counter() - start_s
        return queue, self._metrics(step, queue, every, times)

    def _score(self, queue: Queue, pause: Pause) -> None:
        """Fill the queue's log-probabilities, by the micro-batches of the updates."""
        seq, whole = self._recipe.batch.seq, bool(self._recipe.compile)
        for update in range(queue.share.updates):
            for rows in queue.micro_batches(update):
                pause("scoring", False)
                ids = queue.ids(rows, queue.positions(rows, seq, whole)).to(self._step.device)
                width = min(ids.shape[1], queue.input_ids.shape[1])
                queue.old[rows, :width] = phases.score(self._step, ids).cpu()[:, :width]
                if self._policy.measures_reference:
                    found = phases.score(self._step, ids, reference=True)
                    queue.reference[rows, :width] = found.cpu()[:, :width]

    def _metrics(
        self, step: int, queue: Queue, every: Sequence[Sampled], times: dict[str, float]
    ) -> RolloutMetrics:
        """Return the metrics of all ranks; a collective."""
        numbers = queue.share.every()
        counted = queue.counted(numbers)
        sampled = torch.tensor([log for number in numbers for log in every[number].completion.logs])
        apart = (queue.old[counted] - sampled).abs()
        rows = self._ranks.numbers(
            float(apart.sum()), float(apart.max()), times["rollout"], times["rewards"], times["scoring"]
        )
        sums, largest, *seconds = zip(*rows, strict=True)
        rollout_s, reward_s, scoring_s = map(max, seconds)
        lengths, prompts = queue.lengths.float(), queue.prompts.float()
        groups = queue.rewards.view(self._policy.prompts, -1)
        equal = float((groups == groups[:, :1]).all(dim=1).float().mean())
        return RolloutMetrics(
            step=step,
            completions=len(every),
            reward=float(queue.rewards.mean()),
            deviation=float(queue.rewards.std()),
            **parts_of([one.reward for one in every]),
            equal_groups=equal if self._policy.group > 1 else None,
            prompts_cut=sum(one.was_cut for one in every) / len(every),
            prompt_lengths=tuple(queue.prompts.tolist()),
            lengths=tuple(queue.lengths.tolist()),
            prompt_tokens_mean=float(prompts.mean()),
            tokens_mean=float(lengths.mean()),
            tokens_max=int(queue.lengths.max()),
            cut_share=sum(not one.completion.stopped for one in every) / len(every),
            log_difference_mean=sum(sums) / float(lengths.sum()),
            log_difference_max=max(largest),
            rollout_s=rollout_s,
            reward_s=reward_s,
            scoring_s=scoring_s,
            rollout_tokens_per_s=float(lengths.sum()) / rollout_s,
            scoring_tokens_per_s=float((lengths + prompts).sum()) / scoring_s,
        )

    def evaluation(self, step: int, count: int, pause: Pause) -> EvalMetrics:
        """Return the mean reward of held-out prompts, one completion each, sampled as in rollouts."""
        start_s, share = time.perf_counter(), self._share
        first, last = (HELD_OUT + count * one // share.ranks for one in (share.rank, share.rank + 1))
        mine, _ = self._answers.of_tasks(range(first, last), 1, pause)
        every = [reward for part in self._ranks.gather([one.reward for one in mine]) for reward in part]
        return EvalMetrics(
            step=step,
            reward=sum(sum(one.values()) for one in every) / count,
            **parts_of(every),
            sequences=count,
            eval_s=time.perf_counter() - start_s,
        )

    def num_tokens(self) -> int:
        """Return the tokens of the newest update on all ranks, without padding."""
        assert self._queue is not None
        size = self._share.completions // self._share.updates
        here = slice(self._update * size, (self._update + 1) * size)
        return int((self._queue.prompts + self._queue.lengths)[here].sum())

    def is_full(self) -> bool:
        """Return whether the newest update's sequences on this rank all have the recipe's length."""
        assert self._queue is not None
        numbers = list(self._share.numbers(self._update))
        lengths = (self._queue.prompts + self._queue.lengths)[numbers]
        return bool((lengths == self._recipe.batch.seq).all())

    def readings(self) -> dict[str, float]:
        """Return reward, divergence and clipped share of the newest update; a collective."""
        assert self._queue is not None
        size = self._share.completions // self._share.updates
        here = slice(self._update * size, (self._update + 1) * size)
        # The sums are weighted so that their mean over micro-batches and ranks is the update's.
        own = self._step.readings["policy_sums"].mean(dim=0)[:2].tolist()
        clipped, divergence = (
            sum(values) / len(values) for values in zip(*self._ranks.numbers(*own), strict=True)
        )
        found = {"reward": float(self._queue.rewards[here].mean()), "clipped_share": clipped}
        return found | ({"kl": divergence} if self._policy.measures_reference else {})

    def queue(self) -> dict[str, Tensor]:
        """Return completions that later updates train on, of all ranks; empty after a rollout's last."""
        if self._queue is None or self._update + 1 == self._share.updates:
            return {}
        return self._queue.tensors(self._ranks.gather(self._queue.own()))

    def restore(self, step: int, queue: Mapping[str, Tensor]) -> None:
        """Continue after ``step`` steps; its queue is there if the rollout has updates left."""
        rollout, update = divmod(step, self._policy.updates_per_rollout)
        if not update:
            return
        self._queue = Queue.restored(rollout, self._share, dict(queue), self._policy, self._vocabulary)
        self._update = update - 1

    def close(self) -> None:
        """End the environment's workers."""
        self._pool.close()


class _Feed:
    """``training.rollouts.BatchFeed``: generates when it is asked, after the step before is done."""

    reads_ahead = False

    def __init__(
        self, rollouts: Rollouts, steps: range, pause: Pause, on_rollout: Callable[[RolloutMetrics], None]
    ):
        self._rollouts, self._steps = rollouts, iter(steps)
        self._pause, self._on_rollout = pause, on_rollout

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        return self._rollouts.batches(next(self._steps), self._pause, self._on_rollout)

    def wait_s(self) -> float:
        """Return 0: the time of rollouts is no part of a step's."""
        return 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def parts_of(rewards: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the mean of each part of the rewards, and the share of completions where it is above 0."""
    names = list(dict.fromkeys(name for one in rewards for name in one))
    values = {name: [one.get(name, 0.0) for one in rewards] for name in names}
    return {
        "parts": {name: sum(of) / len(of) for name, of in values.items()},
        "shares": {name: sum(value > 0 for value in of) / len(of) for name, of in values.items()},
    }


def _refuse_data(options: TrainOptions) -> None:
    """Refuse data, which a policy does not train on."""
    if options.data != SyntheticData() or options.eval_data is not None:
        problem = "a policy trains on its own completions"
        raise InputError(problem, "leave the data out, or use objective: pretrain", field="data.train")
    if options.epochs is not None:
        raise InputError("a policy has no data to pass over", "use steps", field="epochs")
