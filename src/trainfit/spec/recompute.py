"""Activation checkpointing: the values of a recipe's ``recompute``."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from trainfit.spec.outside import Extensible
from trainfit.spec.value import FromPercent, PositiveInt, Value


class Every(Value):
    """Recompute every k-th layer."""

    every: PositiveInt


class Budget(Value):
    """Keep this share of what compile would save (torch's activation memory budget)."""

    budget: Annotated[float, Field(ge=0, le=1), FromPercent]


class BudgetGib(Value):
    """Keep the peak of allocated memory within so many GiB (2**30 bytes), by the fastest plan found.

    The planner (``planning/``) turns it into ``Layers``; a step is only built from those.
    """

    budget_gib: Annotated[float, Field(gt=0)]


BlockRecompute = Literal["none", "elementwise", "full"]


class LayerRun(Value):
    """``count`` consecutive decoder blocks with equal recomputation and offload.

    ``recompute``: what their backward computes again. ``elementwise``: all but matrix products and attention.
    ``offload``: share of the bytes they keep that waits in pinned host memory, in the run's first block and
    every ``every``-th after it. The model's last block keeps all.
    """

    recompute: BlockRecompute = "none"
    offload: Annotated[float, Field(ge=0, le=1), FromPercent] = 0.0
    every: PositiveInt = 1
    count: PositiveInt = 1

    def blocks(self) -> list["LayerRun"]:
        """Return one entry a block, each of count 1."""
        shares = (self.offload if index % self.every == 0 else 0.0 for index in range(self.count))
        return [LayerRun(recompute=self.recompute, offload=share) for share in shares]


class Layers(Value):
    """Recomputation and offload of each decoder block, first to last; a bare name is one block.

    Equal neighbours are joined, so equivalent plans are equal.
    """

    layers: Annotated[tuple[LayerRun, ...], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _names(cls, data: Any) -> Any:
        runs = data.get("layers") if isinstance(data, dict) else None
        if not isinstance(runs, list | tuple):
            return data
        # A tuple: what a validator returns counts as Python, where strict kinds take no list for one.
        return {**data, "layers": tuple({"recompute": run} if isinstance(run, str) else run for run in runs)}

    @field_validator("layers")
    @classmethod
    def _joined(cls, runs: tuple[LayerRun, ...]) -> tuple[LayerRun, ...]:
        joined: list[LayerRun] = []
        for run in runs:
            same = joined and run.model_copy(update={"count": joined[-1].count}) == joined[-1]
            if same and joined[-1].count % run.every == 0:
                joined[-1] = run.model_copy(update={"count": run.count + joined[-1].count})
            else:
                joined.append(run)
        return tuple(joined)

    def blocks(self) -> list[LayerRun]:
        """Return one entry a block, each of count 1."""
        return [block for run in self.layers for block in run.blocks()]


class SavedOps(Value):
    """Operations whose results are kept: ``mm``, ``attention``, or any of PyTorch's by name (``silu``).

    ``every``: of each block's matrix products the first and every ``every``-th after it are kept; with 2 they
    are those of torchtitan's selective checkpointing by operation.
    """

    save: Annotated[tuple[str, ...], Field(min_length=1)]
    every: PositiveInt = 1

    @field_validator("save")
    @classmethod
    def _in_order(cls, save: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(set(save)))  # Equivalent lists are equal.


class Selective(Value):
    """Recompute all of every block but what these operations gave."""

    selective: SavedOps


TAGS = {
    next(iter(kind.model_fields)): kind.__name__ for kind in (Every, Budget, BudgetGib, Layers, Selective)
}
"""Key of a mapping -> tag of its kind; no tag is a key, so that errors can leave tags out of a path."""


def _tag(value: Any) -> str:
    """Return the tag of ``value``; of a mapping its first known key decides."""
    if isinstance(value, Value):
        return type(value).__name__
    return next((TAGS[key] for key in value if key in TAGS), "Every") if isinstance(value, dict) else "name"


Policy = Annotated[Literal["none", "full", "selective", "fit"], Extensible("recompute")]
"""fit: the fastest plan found whose device bytes fit on the GPU, planned as a budget is."""
Recompute = Annotated[
    Annotated[Policy, Tag("name")]
    | Annotated[Every, Tag("Every")]
    | Annotated[Budget, Tag("Budget")]
    | Annotated[BudgetGib, Tag("BudgetGib")]
    | Annotated[Layers, Tag("Layers")]
    | Annotated[Selective, Tag("Selective")],
    Discriminator(_tag),
]
