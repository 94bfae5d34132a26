"""Training of a small decoder on a fixed number of tokens, with batches of several sizes.

The tokens come from a random source, so that no data set is needed and the loss of the source itself is
known: the least that a model can reach. Each token is one of ``CHOICES``, by Zipf's law, of a list that the
token before it selects or, every second time, the token before it and the upper bits of the one before that.
The first lists are learned in some ten thousand tokens, the others over millions.

Shapes: n sequences, s tokens of a sequence.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.step import Batch, Step, assemble

VOCAB, GROUPS, CHOICES = 256, 16, 8
SEQ = 128
WARMUP_STEPS, WARMUP_SHARE = 40, 0.25
"""Optimizer steps over which the learning rate rises, but at most this share of a run's; then it is constant.

Counted in steps, because AdamW's moments need steps to settle, however many tokens each has.
"""
EVAL_SEQUENCES = 128


@dataclass(frozen=True)
class Size:
    """A decoder's size, the budget and the batches, in tokens; the learning rate is that of ``base`` tokens.

    With a batch of B tokens it is ``lr`` sqrt(B / base) times each of ``factors``, of which the best counts
    (AdamW's square-root rule: Malladi et al., arXiv:2205.10287). The first factor is tried for every batch
    before time is spent on another.
    """

    hidden: int
    layers: int
    budget: int
    batches: Sequence[int]
    points: int  # At which the loss of held-out sequences is taken, evenly over the budget
    base: int
    lr: float
    factors: Sequence[float]

    def rate(self, batch: int, factor: float) -> float:
        """Return the learning rate of a batch of so many tokens."""
        return factor * self.lr * math.sqrt(batch / self.base)

    def steps(self, batch: int) -> int:
        return self.budget // batch


SIZES = {
    "cpu": Size(64, 2, 2**19, tuple(2**power for power in range(8, 17)), 8, 2**13, 8e-3, (1.0, 0.5, 2.0)),
    "tiny": Size(32, 1, 2**14, (1024, 4096), 2, 1024, 1e-2, (1.0, 0.5)),
    "full": Size(128, 2, 2**20, tuple(2**power for power in range(8, 17)), 8, 2**13, 6e-3, (1.0, 0.5, 2.0)),
}


def size_of(form: str, device: torch.device) -> Size:
    """Return the size of a form; the full one is smaller on a CPU."""
    return SIZES["cpu" if form == "full" and device.type == "cpu" else form]


@lru_cache(maxsize=4)
def sequences(num: int, seed: int) -> Tensor:
    """Return ``num`` sequences of the source, int64 [n, SEQ]; the lists are the same for every seed."""
    short, long = _lists()
    generator = torch.Generator().manual_seed(seed + 1)
    found_ns = torch.randint(VOCAB, (num, SEQ), generator=generator)
    choice_ns = torch.multinomial(_shares(), num * SEQ, replacement=True, generator=generator).view(num, SEQ)
    is_long_ns = torch.rand(num, SEQ, generator=generator) < 0.5
    for at in range(2, SEQ):
        group_n, before_n = found_ns[:, at - 2] * GROUPS // VOCAB, found_ns[:, at - 1]
        choice_n = choice_ns[:, at]
        longer_n = long[group_n, before_n, choice_n]
        found_ns[:, at] = torch.where(is_long_ns[:, at], longer_n, short[before_n, choice_n])
    return found_ns


def _lists() -> tuple[Tensor, Tensor]:
    """Return the tokens that may follow one token [VOCAB, CHOICES], and two [GROUPS, VOCAB, CHOICES]."""
    generator = torch.Generator().manual_seed(0)
    short = torch.randint(VOCAB, (VOCAB, CHOICES), generator=generator)
    return short, torch.randint(VOCAB, (GROUPS, VOCAB, CHOICES), generator=generator)


def _shares() -> Tensor:
    """Return the probability of each choice of a list [CHOICES]."""
    weights = 1 / torch.arange(1, CHOICES + 1, dtype=torch.float64)
    return weights / weights.sum()


def source_loss(some_ns: Tensor) -> float:
    """Return the mean loss of the source's own probabilities on sequences of it, in nats a token.

    Over the tokens that a model predicts; the second of a sequence is uniform.
    """
    short, long = _lists()
    group, before, token = some_ns[:, :-2] * GROUPS // VOCAB, some_ns[:, 1:-1], some_ns[:, 2:]
    shares = _shares()
    found = torch.zeros(token.shape, dtype=torch.float64)
    for choices in (short[before], long[group, before]):  # [n, s - 2, CHOICES]
        found += 0.5 * ((choices == token[..., None]) * shares).sum(-1)
    losses = -found.log()
    return float((losses.sum() + len(some_ns) * math.log(VOCAB)) / (losses.numel() + len(some_ns)))


def held_out() -> Tensor:
    """Return the sequences that no model is trained on [n, SEQ]."""
    return sequences(EVAL_SEQUENCES, seed=1)


@dataclass
class Trained:
    """Losses of held-out sequences by the number of tokens seen, in nats; and what the run was."""

    lr: float
    steps: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    step_s: float = math.inf  # Mean seconds of a step, without those up to the first evaluation
    elapsed_s: float = 0.0

    @property
    def last(self) -> float:
        """The loss after the whole budget; infinite where the training diverged."""
        return self.losses[max(self.losses)] if all(map(math.isfinite, self.losses.values())) else math.inf


@dataclass
class Pace:
    """Seconds that a run needs, from those of larger batches: a step's time falls to the host's.

    Before the first run nothing is known, and a run needs no time.
    """

    size: Size
    step_s: dict[int, float] = field(default_factory=dict)  # By batch
    apart_s: float = math.inf  # Of building and evaluating: the least so far

    def add(self, batch: int, run: Trained) -> None:
        """Count a run."""
        self.step_s[batch] = min(run.step_s, self.step_s.get(batch, math.inf))
        self.apart_s = min(self.apart_s, max(0.0, run.elapsed_s - run.steps * run.step_s))

    def needed_s(self, batches: Iterable[int]) -> float:
        """Return the seconds that one run of each batch takes."""
        if not self.step_s:
            return 0.0
        return sum(self.apart_s + self.size.steps(batch) * self._step_s(batch) for batch in batches)

    def _step_s(self, batch: int) -> float:
        smallest, *larger = sorted(self.step_s)
        if batch >= smallest or not larger:
            return self.step_s[max(batch, smallest)]
        # On the line through the two smallest batches, but no less than in proportion to the tokens.
        rise = max(0.0, self.step_s[larger[0]] - self.step_s[smallest]) / (larger[0] - smallest)
        known_s = self.step_s[smallest]
        return max(known_s - rise * (smallest - batch), known_s * batch / smallest)


def train(size: Size, batch: int, lr: float, device: torch.device) -> Trained:
    """Return one training of the whole budget with batches of ``batch`` tokens."""
    began = time.perf_counter()
    train_ns, eval_ns = sequences(size.budget // SEQ, seed=0), held_out()
    step = assemble(_recipe(size, batch, lr, device), device)
    evaluated = _batch(eval_ns, device)
    found, every = Trained(lr), size.budget // size.points
    warmup = max(1, min(WARMUP_STEPS, int(WARMUP_SHARE * size.steps(batch))))
    data_ns = train_ns.to(device)
    timed_from, at = time.perf_counter(), 0
    timed: list[tuple[float, int]] = []  # Seconds and steps up to each evaluation
    for some_ns in data_ns.split(batch // SEQ):
        for optimizer in step.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, (found.steps + 1) / warmup)
        loss = step([_batch(some_ns, device)])
        found.steps += 1
        seen = found.steps * batch
        if seen % every < batch:
            loss.item()  # Waits for the device.
            timed.append((time.perf_counter() - timed_from, found.steps - at))
            found.losses[seen] = _evaluate(step, evaluated)
            timed_from, at = time.perf_counter(), found.steps
    seconds, steps = zip(*(timed[1:] or timed), strict=True)
    found.step_s, found.elapsed_s = sum(seconds) / sum(steps), time.perf_counter() - began
    return found


def _batch(some_ns: Tensor, device: torch.device) -> Batch:
    ids = some_ns.to(device)
    return {"input_ids": ids, "labels": ids}


def _evaluate(step: Step, evaluated: Batch) -> float:
    with torch.no_grad():
        return step.cross_entropy(evaluated).item()


def _recipe(size: Size, batch: int, lr: float, device: torch.device) -> Any:
    config = {
        "model_type": "llama", "hidden_size": size.hidden, "intermediate_size": 8 * size.hidden // 3,
        "num_hidden_layers": size.layers, "num_attention_heads": max(1, size.hidden // 64),
        "num_key_value_heads": max(1, size.hidden // 64), "vocab_size": VOCAB,
        "max_position_embeddings": SEQ, "tie_word_embeddings": False,
    }  # fmt: skip
    implementation = "fused" if device.type == "cuda" else "foreach"
    return recipe_from({
        "model": {"config": config, "implementation": "native"},
        "batch": {"micro": batch // SEQ, "seq": SEQ}, "precision": "fp32",
        "optimizer": {"name": "adamw", "lr": lr, "implementation": implementation},
    })  # fmt: skip


def largest_useful(losses: Mapping[int, float], tolerance: float) -> int:
    """Return the largest batch whose loss is at most ``tolerance`` above the smallest, as a share of it."""
    best = min(losses.values())
    return max(batch for batch, loss in losses.items() if loss <= (1 + tolerance) * best)
