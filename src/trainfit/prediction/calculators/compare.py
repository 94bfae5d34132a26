"""Compare published calculators with the virtual GPU, for one recipe.

Enters: a Recipe and its Estimate by the virtual GPU. Leaves: rows: theirs, ours, how far off, and what theirs
leaves out. A calculator that cannot express a recipe has no row; it is never bent to fit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trainfit.catalog.load import model_config
from trainfit.prediction.calculators import rules, ultrascale
from trainfit.prediction.shape import Shape, shape_of
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate
from trainfit.spec.value import Value

Unit = Literal["bytes", "FLOP"]


class Comparison(Value):
    """One calculator's number and ours."""

    calculator: str
    quantity: str
    theirs: float
    ours: float
    unit: Unit
    leaves_out: str
    source: str

    @property
    def difference(self) -> float | None:
        """Theirs over ours, minus 1: +0.25 is a quarter too much. None where ours is 0."""
        return self.theirs / self.ours - 1 if self.ours else None


@dataclass(frozen=True)
class Case:
    """Input of a calculator, which never includes the ledger."""

    recipe: Recipe
    shape: Shape
    params: int

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step on one data-parallel rank."""
        return self.recipe.batch.tokens


@dataclass(frozen=True)
class Calculator:
    """A published calculator: which of our numbers it answers, and what it cannot see.

    ``theirs`` gives None for a recipe that it has no way to say.
    """

    name: str
    quantity: str
    unit: Unit
    source: str
    leaves_out: str
    theirs: Callable[[Case], float | None]
    ours: Callable[[Estimate], float | None]


def widget_spec(case: Case) -> ultrascale.WidgetSpec | None:
    """Return the recipe as the Ultrascale widget's inputs; None for adapters and quantised bases."""
    recipe, shape = case.recipe, case.shape
    recomputation = recomputation_of(recipe)
    if recipe.adapter or recomputation is None:
        return None
    return ultrascale.WidgetSpec(
        a=shape.heads,
        b=recipe.batch.micro,
        h=shape.hidden,
        h_ff=shape.feed_forward,
        layers=shape.layers,
        s=recipe.batch.seq,
        v=shape.vocab,
        t=recipe.parallel.tensor,
        d=recipe.parallel.replicate * recipe.parallel.shard,
        zero=3 if recipe.parallel.shard > 1 else 0,
        mixed=recipe.precision != "fp32",
        recomputation=recomputation,
        ff_activation=shape.kind,
    )


Recomputation = Literal["none", "selective", "full"]


def recomputation_of(recipe: Recipe) -> Recomputation | None:
    """The recipe's recomputation where the published forms have a word for it."""
    words: dict[str, Recomputation] = {"none": "none", "selective": "selective", "full": "full"}
    return words.get(recipe.recompute) if isinstance(recipe.recompute, str) else None


def _widget_total(case: Case) -> float | None:
    spec = widget_spec(case)
    return ultrascale.memory(spec).total if spec else None


def _widget_activations(case: Case) -> float | None:
    spec = widget_spec(case)
    return ultrascale.activation_bytes(spec) if spec else None


def _korthikanti(case: Case) -> float | None:
    recipe, shape, recomputation = case.recipe, case.shape, recomputation_of(case.recipe)
    if recipe.precision == "fp32" or recomputation is None:
        return None
    return rules.korthikanti_activations(
        rules.LayersSpec(
            a=shape.heads,
            b=recipe.batch.micro,
            s=recipe.batch.seq,
            h=shape.hidden,
            layers=shape.layers,
            t=recipe.parallel.tensor,
            recomputation=recomputation,
        )
    )


def _four_times(case: Case) -> float | None:
    weight_bytes = 2 if case.recipe.precision in ("bf16", "fp8") else 4
    return rules.four_times(rules.ParamsSpec(params=case.params, bytes_per_param=weight_bytes))


def _sixteen_bytes(case: Case) -> float | None:
    if not case.recipe.precision.startswith("amp"):
        return None
    return rules.sixteen_bytes(rules.ParamsSpec(params=case.params))


def _six_n(case: Case) -> float | None:
    return rules.six_n(rules.TokensSpec(params=case.params, tokens=case.tokens))


def _peak(estimate: Estimate) -> float | None:
    return estimate.peak_allocated_bytes


def _activations(estimate: Estimate) -> float | None:
    # In the optimizer phase the activations are gone, so there is nothing to compare.
    return None if estimate.peak_phase.endswith("optimizer") else estimate.breakdown.activations


def _states(estimate: Estimate) -> float | None:
    held = estimate.breakdown
    return held.weights + held.gradients + held.optimizer


def _model_flops(estimate: Estimate) -> float | None:
    return estimate.model_flops


CALCULATORS = (
    Calculator(
        "Ultrascale Playbook widget", "peak memory", "bytes",
        "https://huggingface.co/spaces/nanotron/ultrascale-playbook",
        "the attention in use (it keeps all scores), GQA, tied and gated weights (it counts GPT-2's), "
        "pure bf16, other optimizers, temporary buffers, the allocator",
        _widget_total, _peak,
    ),
    Calculator(
        "Ultrascale Playbook widget", "activations", "bytes",
        "https://huggingface.co/spaces/nanotron/ultrascale-playbook",
        "the attention in use, fp32 inside norms, rotary copies, gradients of the logits; counts dropout "
        "masks that "
        "most models do not have",
        _widget_activations, _activations,
    ),
    Calculator(
        "Korthikanti et al., equation 2", "activations", "bytes", "https://arxiv.org/abs/2205.05198",
        "embedding, logits and loss; assumes h_ff = 4 h, GELU, dropout, no GQA, scores kept",
        _korthikanti, _activations,
    ),
    Calculator(
        "4x rule", "peak memory", "bytes",
        "https://huggingface.co/docs/accelerate/usage_guides/model_size_estimator",
        "all activations, so the batch and the sequence; frozen weights; temporary buffers",
        _four_times, _peak,
    ),
    Calculator(
        "16 bytes a parameter (ZeRO)", "weights, gradients, optimizer", "bytes",
        "https://arxiv.org/abs/1910.02054",
        "which phase holds the peak; autocast over fp32 weights keeps no 16-bit copy all the time",
        _sixteen_bytes, _states,
    ),
    Calculator(
        "6N", "model FLOPs of a step", "FLOP", "https://arxiv.org/abs/2001.08361",
        "attention scores, frozen weights, idle experts; counts embeddings that are only looked up",
        _six_n, _model_flops,
    ),
)  # fmt: skip
"""Every calculator that is compared; a new one is a new row."""


def compare(recipe: Recipe, ours: Estimate) -> tuple[Comparison, ...]:
    """Return the calculators that cover this recipe, each with our estimate of it.

    Raises:
        InputError: a model whose shape the closed forms do not know.
    """
    case = Case(recipe=recipe, shape=shape_of(model_config(recipe.model.config)), params=ours.params)
    rows = []
    for calculator in CALCULATORS:
        theirs, mine = calculator.theirs(case), calculator.ours(ours)
        if theirs is None or mine is None:
            continue
        rows.append(
            Comparison(
                calculator=calculator.name,
                quantity=calculator.quantity,
                theirs=float(theirs),
                ours=float(mine),
                unit=calculator.unit,
                leaves_out=calculator.leaves_out,
                source=calculator.source,
            )
        )
    return tuple(rows)
