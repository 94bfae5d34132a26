"""Compiler budget: torch.compile chooses what to recompute within a share of the activations it would keep.

The partitioner solves a knapsack for the fewest FLOPs (``torch._functorch.config.activation_memory_budget``,
pytorch/pytorch#126320). A prediction runs the same partitioner.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainfit.spec.recipe import Recipe
from trainfit.spec.recompute import Budget
from trainfit.techniques.base import Data, Draw, Technique, refusal
from trainfit.techniques.draft import Draft
from trainfit.virtual.trace.exclusive import replaced


def check(recipe: Recipe) -> None:
    """Refuse eager code: only the compiler can spend the budget."""
    if not recipe.compile:
        remedy = "set compile: model (or block), or use recompute: selective, {every: 2} or {budget_gib: x}"
        raise refusal(
            recipe,
            "recompute.budget",
            "this budget is torch.compile's, and the recipe is not compiled",
            remedy,
        )


def apply(recipe: Recipe, draft: Draft) -> None:
    """Set the budget while the forward runs, because its first run compiles."""
    assert isinstance(recipe.recompute, Budget)
    from torch._functorch import config

    budget = recipe.recompute.budget
    draft.around_forward.append(lambda: config.patch(activation_memory_budget=budget))
    draft.around_forward.append(grouped_heads_counted)


@contextmanager
def grouped_heads_counted() -> Iterator[None]:
    """Let torch count the FLOPs of fused attention over grouped key heads, in this context and thread.

    The partitioner weighs attention by these FLOPs. torch 2.11 raised "shapes are incompatible" for unequal
    numbers of heads. Here each key head counts once for every query head that reads it, as in torch 2.13.
    """
    from torch.utils import flop_counter

    original = flop_counter.sdpa_flop_count

    def count(q_bhsd: Sequence[int], k_bksd: Sequence[int], v_bksd: Sequence[int]) -> int:
        k, v = ((shape[0], q_bhsd[1], *shape[2:]) for shape in (k_bksd, v_bksd))
        return original(q_bhsd, k, v)

    with replaced(flop_counter, "sdpa_flop_count", count):
        yield


def _describe(recipe: Recipe) -> str:
    return f"recompute budget {recipe.recompute.budget}" if isinstance(recipe.recompute, Budget) else ""


def _draw(chance: random.Random, _: Data) -> Data:
    budget = chance.choice((0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95))
    return {"compile": chance.choice(("block", "block", "model")), "recompute": {"budget": budget}}


TECHNIQUE = Technique(
    name="recompute_budget",
    order=100,
    title="Compiler budget",
    covers={"recompute": ("budget",)},
    check=check,
    apply=apply,
    describe=_describe,
    examples=({"recompute": {"budget": 0.5}},),
    needs={"compile": "model"},
    draw=Draw(alone=_draw),
)
