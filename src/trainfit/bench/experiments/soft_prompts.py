"""``soft_prompts``: virtual tokens trained by themselves and by layers: parameters, memory, loss curves.

The base learns sequences that follow one of several rules, each a permutation of the vocabulary, and whose
first token names the rule: the next token is the rule's with probability FOLLOWS, else any. The base is then
frozen, and virtual tokens are trained on sequences of one rule without that first token: they have to say
what it said. All kinds see the same batches. ``bound`` is the loss of a model that knows the rule.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainfit.bench.harness.bench import Bench, Point, value
from trainfit.bench.harness.experiment import Column, Experiment, Plot
from trainfit.bench.harness.memory_measure import start_afresh
from trainfit.bench.harness.memory_prediction import predictions
from trainfit.prediction.predict import predict
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate
from trainfit.step import Batch, Step, assemble

FOLLOWS = 0.9
KINDS = (("prompt", "none"), ("p-tuning", "mlp"), ("p-tuning", "lstm"), ("prefix", "none"), ("prefix", "mlp"))
"""Kind of adapter and the layers that produce its virtual tokens; p-tuning without layers is ``prompt``."""
NUM_POINTS = 10
"""Points of a loss curve, each the mean over as many steps as lie between two."""
DRAWN = (0.001, 0.01, 0.03, 0.3)
"""Learning rates whose curves are drawn."""
RULE = 1
"""Number of the rule that the virtual tokens learn."""


class Size(NamedTuple):
    """A base, and how long it and the virtual tokens train."""

    hidden: int
    layers: int
    vocabulary: int
    rules: int
    tokens: int
    micro: int
    seq: int
    base_steps: int
    steps: int
    rates: tuple[float, ...]

    @property
    def config(self) -> dict[str, Any]:
        heads = self.hidden // 16
        return {
            "model_type": "llama", "hidden_size": self.hidden, "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2,
            "vocab_size": self.vocabulary + self.rules, "max_position_embeddings": 2 * self.seq,
        }  # fmt: skip

    def kept(self, kind: str) -> int:
        """Return the parameters that are kept: virtual tokens, or keys and values of each layer."""
        return self.tokens * self.hidden * (self.layers if kind == "prefix" else 1)  # Two, in half the heads.


TINY = Size(32, 1, 16, 4, 4, 16, 12, 60, 20, (0.03,))
FULL = {
    "cpu": Size(32, 2, 16, 4, 4, 16, 12, 400, 100, (0.001, 0.01, 0.03, 0.1, 0.3)),
    "cuda": Size(256, 4, 64, 16, 10, 64, 64, 800, 200, (0.001, 0.01, 0.03, 0.3)),
}


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield the base, then for each kind its size and its loss curves."""
    size = TINY if bench.tiny else FULL[bench.device.type]
    base: Point = {"part": "base"}
    sizes: list[Point] = [{"part": "size", **_named(one)} for one in KINDS]
    curves = {
        (one, rate): _curve_points(size, one, rate) for rate in size.rates for one in KINDS
    }  # A limit of time cuts the largest rates.
    wanted = bench.wanted([base, *sizes, *(point for points in curves.values() for point in points)])
    if not wanted:
        return
    bases: list[Mapping[str, Tensor]] = []

    def trained() -> dict[str, Cell]:
        weights, numbers = _trained_base(bench, size)
        bases.append(weights)
        return numbers

    yield from bench.attempt([base], trained, lambda numbers: [value(base, **numbers)])
    of_kinds = dict(zip(KINDS, sizes, strict=True))
    recipes = {one: _size_recipe(bench, size, one) for one, point in of_kinds.items() if bench.wants(point)}
    ahead = [] if bench.gpu is None or bench.late() else list(recipes.values())
    with predictions(ahead, bench.device, predict) as predicted:
        for one, recipe in recipes.items():
            yield from bench.find(of_kinds[one], partial(_sizes, bench, size.kept(one[0]), recipe, predicted))
    for (one, rate), points in curves.items():
        if bases and bench.wanted(points):
            found = partial(_curve, bench, size, one, rate, bases[0])
            yield from bench.attempt(points, found, partial(_rows, points))


def _named(one: tuple[str, str]) -> Point:
    kind, layers = one
    return {"adapter": kind if layers == "none" else f"{kind}, {layers}"}


def _curve_points(size: Size, one: tuple[str, str], rate: float) -> list[Point]:
    every = size.steps // NUM_POINTS
    steps = range(every, size.steps + 1, every)
    return [{"part": "training", **_named(one), "rate": rate, "step": step} for step in steps]


def _rows(points: list[Point], losses: list[float]) -> Iterator[BenchRow]:
    for point, loss in zip(points, losses, strict=True):
        yield value(point, loss=loss)


def recipe_of(size: Size, one: tuple[str, str] | None, rate: float, device_type: str) -> Recipe:
    """Return the recipe of the base (None), or of virtual tokens on it."""
    fused = "fused" if device_type == "cuda" else "foreach"
    data: dict[str, Any] = {
        "model": {"config": size.config, "name": "rules", "implementation": "hf"},
        "batch": {"micro": size.micro, "seq": size.seq},
        "precision": "fp32",
        "optimizer": {"name": "adamw", "implementation": fused, "lr": rate, "weight_decay": 0.0},
    }
    if one is not None:
        data["adapter"] = {"kind": one[0], "reparametrization": one[1], "tokens": size.tokens}
    return recipe_from(data)


def batch_of(size: Size, seed: int, rule: int | None, device: torch.device) -> Batch:
    """Return a batch of one rule without its name, or (None) of any rules, named by the first token."""
    chance = torch.Generator().manual_seed(seed)
    rules_rv = torch.stack(
        [torch.randperm(size.vocabulary, generator=torch.Generator().manual_seed(number))
         for number in range(size.rules)]
    )  # fmt: skip
    b = size.micro
    rules_b = torch.randint(size.rules, (b,), generator=chance) if rule is None else torch.full((b,), rule)
    ids_bs = torch.randint(size.vocabulary, (b, size.seq), generator=chance)
    follows_bs = torch.rand((b, size.seq), generator=chance) < FOLLOWS
    first = 0
    if rule is None:
        ids_bs[:, 0] = size.vocabulary + rules_b
        first = 1
    for at in range(first + 1, size.seq):
        following_b = rules_rv[rules_b, ids_bs[:, at - 1]]
        ids_bs[:, at] = torch.where(follows_bs[:, at], following_b, ids_bs[:, at])
    ids_bs = ids_bs.to(device)
    return {"input_ids": ids_bs, "labels": ids_bs.clone()}


def bound(size: Size) -> float:
    """Return the cross-entropy of the next token for a model that knows the rule, in nats."""
    other = (1 - FOLLOWS) / size.vocabulary
    likely = FOLLOWS + other
    return -likely * math.log(likely) - (size.vocabulary - 1) * other * math.log(other)


def _trained_base(bench: Bench, size: Size) -> tuple[Mapping[str, Tensor], dict[str, Cell]]:
    torch.manual_seed(0)
    step = assemble(recipe_of(size, None, 0.003, bench.device.type), bench.device)
    for number in range(size.base_steps):
        step([batch_of(size, 1000 + number, None, bench.device)])
    with torch.no_grad():
        named = float(step.cross_entropy(batch_of(size, 1, None, bench.device)))
        unnamed = float(step.cross_entropy(batch_of(size, 1, RULE, bench.device)))
    weights = {name: tensor.detach().clone() for name, tensor in step.model.state_dict().items()}
    return weights, {"named_loss": named, "unnamed_loss": unnamed, "bound": bound(size)}


def _size_recipe(bench: Bench, size: Size, one: tuple[str, str]) -> Recipe:
    recipe = recipe_of(size, one, size.rates[0], bench.device.type)
    if bench.gpu is None:
        return recipe
    hardware = recipe.hardware.model_copy(update={"gpu": bench.gpu.name})
    return recipe.model_copy(update={"hardware": hardware})


def _sizes(
    bench: Bench, kept: int, recipe: Recipe, predicted: Callable[[Recipe], Estimate]
) -> dict[str, Cell]:
    """Return the parameters while training and after, and on a GPU the peak with its prediction."""
    held = start_afresh(bench)  # By the harness and the base
    step = assemble(recipe, bench.device)
    trained = sum(parameter.numel() for parameter in step.model.parameters() if parameter.requires_grad)
    found: dict[str, Cell] = {"trained_params": trained, "kept_params": kept}
    if bench.device.type == "cuda" and bench.gpu is not None:
        found["peak_bytes"] = _peak(step, bench.device) - held
        found["predicted_bytes"] = predicted(recipe).peak_allocated_bytes
    return found


def _peak(step: Step, device: torch.device) -> int:
    batches = step.random_batches()
    for _ in range(2):
        step(batches)
    torch.cuda.reset_peak_memory_stats(device)
    step(batches)
    return torch.cuda.max_memory_allocated(device)


def _curve(
    bench: Bench, size: Size, one: tuple[str, str], rate: float, base: Mapping[str, Tensor]
) -> list[float]:
    """Return the mean losses of equal parts of the training."""
    torch.manual_seed(1)
    step = assemble(recipe_of(size, one, rate, bench.device.type), bench.device)
    model: Any = step.model
    model.base_model.load_state_dict(base)
    losses = [step([batch_of(size, number, RULE, bench.device)]) for number in range(size.steps)]
    parts = torch.stack(losses).view(NUM_POINTS, -1).mean(1)
    return [float(loss) if math.isfinite(loss) else math.log(size.vocabulary) for loss in parts.tolist()]


EXPERIMENT = Experiment(
    title="Soft prompts, with and without layers that produce them",
    question="What do the layers of prefix tuning and p-tuning cost while training, and what are they for?",
    run=run,
    limit_s=120,
    columns=(
        Column("trained_params", "trained", ",", note="parameters while training"),
        Column("kept_params", "kept", ",", note="parameters after it: what the layers produce"),
        Column("peak_bytes", "peak", note="allocated, of the third step, less what other models hold"),
        Column("predicted_bytes", "predicted", note="its prediction"),
        Column("named_loss", "named", ".3f", note="the base's loss where the first token names the rule"),
        Column("unnamed_loss", "unnamed", ".3f", note="and where it does not"),
        Column("bound", format=".3f", note="the loss of a model that knows the rule"),
        Column("loss", format=".3f", note="mean since the step before, in nats a token"),
    ),
    plots=(
        Plot(
            x=("step",), y="loss", series="adapter", panels=("rate",),
            where={"part": ("training",), "rate": DRAWN}, names={rate: f"rate {rate:g}" for rate in DRAWN},
            order={"adapter": tuple(map(str, (_named(one)["adapter"] for one in KINDS)))},
            title="Loss of virtual tokens, by learning rate", x_label="step", y_label="nats a token",
        ),
    ),
)  # fmt: skip
