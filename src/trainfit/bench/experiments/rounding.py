"""``rounding``: what fp16 and bf16 lose in each part of a training step, against fp32.

A small decoder is trained in fp32. From its weights, gradients and AdamW moments one more step is then taken,
of which one quantity at a time is rounded to a 16-bit dtype. fp16 has 10 bits of fraction and 5 of exponent
(least value 2^-24), bf16 7 and 8. So fp16's products and weights are 8 times as exact, and its small
gradients and their squares vanish unless they are scaled or kept in fp32.

All of it is rounding, which is the same on every device.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from trainfit.bench.harness.bench import Bench, Point
from trainfit.bench.harness.experiment import Column, Experiment, Plot
from trainfit.kernels.stochastic_rounding.op import round_stochastically
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.step import Batch, Step, assemble

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
STOCHASTIC = "bf16, stochastic"
SCALE = 2.0**16
"""The first scale of ``torch.amp.GradScaler``."""
WIDTHS = {"tiny": 64, "full": 128}
STEPS = {"tiny": 10, "full": 60}
RATES = (1e-3, 1e-4, 1e-5, 1e-6)
BETA2, EPS, LR = 0.999, 1e-8, 1e-3
VOCABULARY, MICRO, SEQ = 512, 4, 64


@dataclass(frozen=True)
class Moment:
    """One moment of a run in fp32, each tensor flat over all matrices."""

    step: Step
    batch: Batch
    weights: Tensor
    gradients: Tensor
    direction: Tensor  # AdamW's update at a learning rate of 1


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield what each quantity loses, by dtype."""
    found: list[Moment] = []

    def moment() -> Moment:  # Trained by the first point that is run.
        if not found:
            found.append(trained(WIDTHS[bench.form], STEPS[bench.form]))
        return found[0]

    for name in DTYPES:
        point: Point = {"quantity": "logits", "dtype": name}
        yield from bench.find(point, lambda name=name: of_logits(moment(), DTYPES[name]))
    for name, scale in (("fp16", 1.0), ("fp16, scaled", SCALE), ("bf16", 1.0)):
        dtype = DTYPES[name.partition(",")[0]]
        how = (dtype, scale)
        point = {"quantity": "gradients", "dtype": name}
        yield from bench.find(point, lambda how=how: of_values(moment().gradients, *how))
    for name, dtype in DTYPES.items():
        point = {"quantity": "squares of gradients", "dtype": name}
        yield from bench.find(point, lambda dtype=dtype: of_values(squares(moment()), dtype))
    for rate in RATES:
        for name in ("fp16", "bf16", STOCHASTIC):
            point = {"quantity": "update of weights", "dtype": name, "lr": rate}
            yield from bench.find(point, lambda name=name, rate=rate: of_update(moment(), name, rate))


def trained(width: int, num_steps: int) -> Moment:
    """Train a decoder of this width in fp32 on sums of small random numbers; return where it came to."""
    config = {
        "model_type": "llama", "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 2,
        "num_attention_heads": width // 32, "num_key_value_heads": width // 32, "vocab_size": VOCABULARY,
        "max_position_embeddings": SEQ,
    }  # fmt: skip
    recipe = recipe_from(
        {
            "model": {"config": config, "implementation": "native"},
            "batch": {"micro": MICRO, "seq": SEQ},
            "precision": "fp32",
            "optimizer": {"lr": LR, "implementation": "foreach"},
            "hardware": {"gpu": "cpu"},
        }
    )
    step = assemble(recipe, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        step([_batch(generator)])
    batch = _batch(generator)
    step.loss(batch).backward()
    (optimizer,) = step.optimizers
    matrices = [p for p in step.model.parameters() if p.dim() == 2 and p.grad is not None]
    gradients = [p.grad for p in matrices if p.grad is not None]
    directions = []
    for p in matrices:
        state = optimizer.state[p]
        first = state["exp_avg"] / (1 - 0.9**num_steps)
        second = state["exp_avg_sq"] / (1 - BETA2**num_steps)
        directions.append(first / (second.sqrt() + EPS))
    flat = [torch.cat([one.detach().flatten() for one in some]) for some in (matrices, gradients, directions)]
    return Moment(step, batch, *flat)


def _batch(generator: torch.Generator) -> Batch:
    """Return sequences in which each token is the one before plus 0 to 3."""
    start = torch.randint(VOCABULARY, (MICRO, 1), generator=generator)
    ids_bs = (start + torch.randint(4, (MICRO, SEQ), generator=generator).cumsum(1)) % VOCABULARY
    return {"input_ids": ids_bs, "labels": ids_bs.clone()}


@torch.no_grad()
def of_logits(moment: Moment, dtype: torch.dtype) -> dict[str, Cell]:
    """Return the error of the logits where weights and activations are in ``dtype``."""
    model, ids_bs = moment.step.model, moment.batch["input_ids"]
    exact = model(input_ids=ids_bs).logits.float()
    found = deepcopy(model).to(dtype)(input_ids=ids_bs).logits.float()
    return {"relative_error": ((found - exact).norm() / exact.norm()).item()}


def squares(moment: Moment) -> Tensor:
    """Return what each gradient adds to AdamW's second moment."""
    return (1 - BETA2) * moment.gradients.square()


def of_values(exact: Tensor, dtype: torch.dtype, scale: float = 1.0) -> dict[str, Cell]:
    """Return what values lose that are stored in ``dtype`` times ``scale``: zeros, infinities, precision."""
    stored = (exact * scale).to(dtype)
    there = exact != 0
    zero, infinite = (stored == 0) & there, stored.isinf()
    kept = there & ~zero & ~infinite
    numbers: dict[str, Cell] = {
        "zero_share": (zero.sum() / there.sum()).item(),
        "infinite_share": (infinite.sum() / there.sum()).item(),
    }
    if kept.any():
        error = (stored[kept].float() / scale - exact[kept]) / exact[kept]
        numbers["relative_error"] = error.square().mean().sqrt().item()
    return numbers


def of_update(moment: Moment, name: str, rate: float) -> dict[str, Cell]:
    """Return what of AdamW's update reaches weights in 16 bits.

    ``kept_share`` is the part of the update's length that arrives, along its direction; ``unmoved_share``
    the weights that do not change.
    """
    dtype = DTYPES[name.partition(",")[0]]
    weights = moment.weights.to(dtype)
    wanted = -rate * moment.direction
    moved = weights.float() + wanted
    if name == STOCHASTIC:
        new = torch.empty_like(weights)
        round_stochastically(new, moved.clone(), seed=0)
    else:
        new = moved.to(dtype)
    applied = new.float() - weights.float()
    asked = wanted != 0
    return {
        "unmoved_share": ((applied == 0) & asked).sum().item() / asked.sum().item(),
        "kept_share": (applied.double() @ wanted.double() / (wanted.double() @ wanted.double())).item(),
    }


EXPERIMENT = Experiment(
    title="What 16 bits lose in a training step",
    question="Which parts of a training step lose more in bf16 than in fp16, and which less?",
    run=run,
    limit_s=120,
    on_host=True,
    columns=(
        Column("lr", format="g"),
        Column("relative_error", format=".1e", note="against fp32, of values neither zero nor infinite"),
        Column("zero_share", note="values that became zero"),
        Column("infinite_share", note="values that became infinite"),
        Column("unmoved_share", note="weights that the update does not change"),
        Column("kept_share", note="part of the update that arrives, along its direction"),
    ),
    plots=(
        Plot(
            x=("lr",), y="kept_share", series="dtype", is_bar=True, scale=100, text=".0f",
            names={1e-3: "lr 1e-3", 1e-4: "lr 1e-4", 1e-5: "lr 1e-5", 1e-6: "lr 1e-6"},
            title="AdamW's update that reaches 16-bit weights", y_label="% of the update",
        ),
    ),
)  # fmt: skip
