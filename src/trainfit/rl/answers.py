"""Answers of a step's model to an environment's tasks: tokens in and out of text, and the rewards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainfit.rl import stop_tokens
from trainfit.rl.environments.pool import Pool
from trainfit.rl.rollout import phases
from trainfit.rl.rollout.generate import Completion, Sampling
from trainfit.spec.errors import InputError
from trainfit.spec.files import writing
from trainfit.spec.parsing.parse import parse
from trainfit.spec.recipe import RANDOM
from trainfit.spec.stop import Stopped
from trainfit.step import Step, vocabulary
from trainfit.training import durable
from trainfit.training.corpus import INDEX, SIDES, Index, Side
from trainfit.training.options import TrainOptions
from trainfit.training.rollouts import GENERATION, Pause
from trainfit.training.tokenizer import (
    TOKENIZER,
    RunTokenizer,
    encode,
    load_tokenizer,
    open_tokenizer,
    train_tokenizer,
)

HELD_OUT = 1 << 30
"""Number of the first held-out task: a run has fewer tasks, and a number of 32 bits seeds any generator."""
BYTES = 257
"""Tokens of the tokenizer of a model from scratch: the bytes, and the end."""


class PolicyTokenizer:
    """The tokenizer of prompts and completions, and the tokens that end a completion."""

    def __init__(self, tokenizer: Any, stops: tuple[int, ...], notes: tuple[str, ...] = ()):
        self.tokenizer, self.stops, self.notes = tokenizer, stops, notes

    @classmethod
    def in_folder(cls, place: Path) -> PolicyTokenizer:
        """Return the tokenizer that ``write_tokenizer`` wrote."""
        index = _index(place)
        assert index.end is not None, "``write_tokenizer`` wrote it"
        stops = tuple(dict.fromkeys((index.end, *index.stops)))
        return cls(load_tokenizer(place / TOKENIZER)[0], stops, index.notes)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of each text; names of special tokens in it are these tokens."""
        return [one.ids for one in encode(self.tokenizer, texts, None)]

    def decode(self, completions: Sequence[Completion]) -> list[str]:
        """Return the text of each completion, without special tokens."""
        rows = [one.tokens[:-1] if one.stopped else one.tokens for one in completions]
        return self.tokenizer.decode_batch(rows)


def write_tokenizer(place: Path, options: TrainOptions, vocabulary: int, *, weights: str) -> None:
    """Write a run's tokenizer into ``place``, as a corpus without documents, or verify what is there.

    Without one it is byte by byte where the model's weights are random, and so its tokens mean nothing yet.

    Args:
        weights: ``model.weights``, whose folder may name more tokens that end a completion.

    Raises:
        InputError: no such tokenizer, another than the run's, or one with more tokens than the model has; or
            trained weights without one.
    """
    if options.tokenizer is None and weights != RANDOM and not place.exists():
        problem = "model.weights names a folder without one, whose tokens are then unknown"
        raise InputError(problem, "give --tokenizer FOLDER of the model", field="tokenizer")
    if options.tokenizer is None:
        found = RunTokenizer(train_tokenizer([], min(BYTES, vocabulary)), [], "")
    else:
        found = open_tokenizer(options.tokenizer, options.chat_template)
    if place.exists():
        durable.check_folder(place)
        # The folder of a resumed run's first weights, and their tokenizer, may be gone.
        if options.tokenizer is not None and _index(place).identity != {"tokenizer": found.digest}:
            problem, remedy = "the run was started with another", "leave it out, or start a new run"
            raise InputError(problem, remedy, field="tokenizer", value=options.tokenizer)
        return
    size, end = found.tokenizer.get_vocab_size(), found.end_token()
    if max(size, end + 1) > vocabulary:
        problem = f"the tokenizer has {size:,} tokens, the model's vocabulary {vocabulary:,}"
        remedy = "use the model's own tokenizer, or a config with a larger vocab_size"
        raise InputError(problem, remedy, field="tokenizer", value=options.tokenizer)
    notes = [f"switched off in tokenizer.json: {' and '.join(found.switched_off)}"] * bool(found.switched_off)
    none = Side(documents=0, tokens=0)
    index = Index(
        identity={"tokenizer": found.digest}, dtype="uint16", tokenizer_tokens=size, notes=tuple(notes),
        end=end, stops=stop_tokens.of_folders(options.tokenizer, weights), train=none, eval=none,
    )  # fmt: skip
    with durable.new_folder(place) as work:
        with writing(work / TOKENIZER):
            found.save(work)
            for side in SIDES:
                (work / f"{side}.bin").touch()
        durable.write_json(work / INDEX, index.model_dump(mode="json"))


def _index(place: Path) -> Index:
    return parse(Index, durable.read_json(place / INDEX), file=str(place / INDEX))


class Sampled(NamedTuple):
    """A completion of a task, with its reward by parts.

    Attributes:
        was_cut: the prompt's beginning was left out.
    """

    prompt: list[int]
    completion: Completion
    reward: dict[str, float]
    was_cut: bool


class Answers:
    """Generates completions of tasks, and has them rewarded.

    Args:
        temperature: of the sampling; None: the recipe's.
    """

    def __init__(
        self, step: Step, tokenizer: PolicyTokenizer, pool: Pool, *, temperature: float | None = None
    ):
        self._step, self._tokens, self._pool = step, tokenizer, pool
        self._max_prompt = phases.policy_of(step.recipe).max_prompt
        changed = {} if temperature is None else {"temperature": temperature}
        words = phases.policy_of(step.recipe).rollout.stop
        own = stop_tokens.of_recipe(words, tokenizer.tokenizer, vocabulary(step.model))
        stops = tuple(dict.fromkeys((*tokenizer.stops, *own)))
        sampling: Sampling = phases.sampling_of(step.recipe, stops).model_copy(update=changed)
        self._generator = phases.generator_of(step, sampling)

    def of_tasks(self, numbers: range, group: int, pause: Pause) -> tuple[list[Sampled], dict[str, float]]:
        """Return completions by number, and the seconds of each phase; a collective.

        Args:
            numbers: of the completions, on which their noise depends.
            group: completions of a task; a completion's task is its number over it.
        """
        tasks, distinct = [number // group for number in numbers], _distinct(numbers, group)
        pause("prompts", True)
        start_s = time.perf_counter()
        texts = self._pool.prompts(distinct)
        prompts_s = time.perf_counter() - start_s
        pause(GENERATION, True)
        start_s = time.perf_counter()
        prompts = dict(zip(distinct, self._prompts(texts, distinct), strict=True))
        try:
            completions = self._completed([prompts[task][0] for task in tasks], numbers.start, pause)
        except Stopped:
            pause("rewards", True)  # The other ranks come here from their own rollouts, and stop, too.
            raise
        rollout_s = time.perf_counter() - start_s
        pause("rewards", True)
        start_s = time.perf_counter()
        texts = self._tokens.decode(completions)
        rewards = self._pool.rewards(tasks, texts, lambda: pause("rewards", False))
        times = {"rollout": rollout_s, "rewards": prompts_s + time.perf_counter() - start_s}
        rows = zip(tasks, completions, rewards, strict=True)
        return [Sampled(prompts[task][0], one, reward, prompts[task][1]) for task, one, reward in rows], times

    def begin(self, numbers: range, group: int) -> None:
        """Let the environment's workers compute prompts that ``of_tasks`` will be called for."""
        self._pool.begin(_distinct(numbers, group))

    def of_texts(self, texts: list[str], first: int, pause: Pause) -> list[str]:
        """Return the answer to each text; ``first``: the number of the first, on which its noise depends."""
        prompts = [ids for ids, _ in self._prompts(texts)]
        return self._tokens.decode(self._completed(prompts, first, pause))

    def _prompts(self, texts: list[str], tasks: list[int] | None = None) -> list[tuple[list[int], bool]]:
        """Return the tokens of each prompt, its last ``max_prompt``, and whether it was longer."""
        try:
            encoded = self._tokens.encode(texts)
        except InputError:
            encoded = [self._encoded(text, number) for number, text in _named(texts, tasks)]
        for (number, _), ids in zip(_named(texts, tasks), encoded, strict=True):
            if not ids:
                remedy = "return text that has tokens"
                raise InputError(f"prompt({number}) has no tokens", remedy, field="objective.environment")
        return [(ids[-self._max_prompt :], len(ids) > self._max_prompt) for ids in encoded]

    def _encoded(self, text: str, number: int) -> list[int]:
        """Return a prompt's tokens, with its task named if it has none."""
        try:
            return self._tokens.encode([text])[0]
        except InputError as error:
            problem = f"prompt({number}) returned {text[:40]!r}: {error.problem}"
            raise InputError(problem, "return other text", field="objective.environment") from None

    def _completed(self, prompts: list[list[int]], first: int, pause: Pause) -> list[Completion]:
        with phases.generating(self._step):
            if self._step.shards_weights:
                self._generator.forget()
            return list(self._generator.completions(prompts, first, lambda: pause(GENERATION, False)))


def _named(texts: list[str], tasks: list[int] | None) -> list[tuple[int, str]]:
    """Return the texts with their tasks' numbers; without tasks, with their places."""
    return list(zip(range(len(texts)) if tasks is None else tasks, texts, strict=True))


def _distinct(numbers: range, group: int) -> list[int]:
    """Return the tasks of completions, each once."""
    return list(dict.fromkeys(number // group for number in numbers))
