"""The layers and micro-batches of a recipe that a trace keeps: a few that stand for the others."""

import math
from contextlib import AbstractContextManager

from torch import nn

from trainfit.ledger.micro_batches import TRACED
from trainfit.models.deferred_init import deferred
from trainfit.models.few_blocks import check_no_outlines
from trainfit.models.layers import layer_lists
from trainfit.spec.recipe import Recipe
from trainfit.techniques import registry
from trainfit.virtual.compile.unrolled import Layers
from trainfit.virtual.gpu import VirtualGpu
from trainfit.virtual.trace.repeated_layers import trim_layers, why_whole
from trainfit.virtual.trace.scope import NO_SCOPE, LayerGroups, Scope, ScopeTracker, part_of_module


class TracedLayers:
    """The layers of a model that a trace keeps; all of them unless ``shorten`` is called."""

    def __init__(self, recipe: Recipe, virtual: VirtualGpu):
        self._recipe, self._virtual = recipe, virtual
        self.groups: list[LayerGroups] = []
        self._scope_of_block: dict[nn.Module, Scope] = {}

    def shorten(self, model: nn.Module, margin: tuple[int, int]) -> None:
        """Remove layers that others stand for from the bare model.

        Args:
            margin: layers before the first and after the last of the three that are compared.
        """
        recipe, virtual = self._recipe, self._virtual
        for technique in registry.applied(recipe):
            technique.label_blocks(recipe, model)  # Blocks that recompute differently are not equal.
        found, repeats, removed = trim_layers(
            layer_lists(model),
            first_differs=first_block_differs(recipe),
            least_period=least_period(recipe),
            multiple=period_multiple(recipe),
            margin=margin,
        )
        check_no_outlines([block for _, blocks in layer_lists(model) for block in blocks])
        self.groups.extend(found)
        for name, blocks in layer_lists(model):
            for number, block in enumerate(blocks):
                self._scope_of_block[block] = ScopeTracker.locate(f"{name}.{number}", self.groups)
        virtual.tracer.ledger.repeats = repeats
        if not found:
            virtual.tracer.ledger.traced_whole = why_whole(
                layer_lists(model), least_period(recipe), period_multiple(recipe)
            )
        if recipe.compile == "model" and found:
            virtual.compiler.layers = Layers(lambda name: part_of_module(name, found), repeats[0])
        trimmed = [one for layer in removed for one in (*layer.parameters(), *layer.buffers())]
        virtual.tracer.live.forget(trimmed)
        if (recorded := deferred()) is not None:
            recorded.forget(trimmed)

    def within_block(self, block: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which allocations are made for each block that this one stands for."""
        return self._virtual.within(self._scope_of_block.get(block, NO_SCOPE))


def first_block_differs(recipe: Recipe) -> bool:
    """Return whether the first block works differently, because of what precedes it."""
    # Behind frozen weights its input has no gradient, and its graph differs.
    if recipe.compile == "block" and recipe.adapter is not None:
        return True
    # With tensor parallel it splits the tokens, in a pipeline it receives them.
    return recipe.mesh.tensor * recipe.mesh.pipeline > 1


def least_period(recipe: Recipe) -> int:
    """Return the fewest blocks of a repeated group."""
    return max((one.min_repeated(recipe) for one in registry.applied(recipe)), default=1)


def period_multiple(recipe: Recipe) -> int:
    """Return the number of blocks of which a repeated group has a multiple."""
    return math.lcm(*(one.take_turns(recipe) for one in registry.applied(recipe)))


def micro_batches_left_out(recipe: Recipe) -> range:
    """Return the numbers of the micro-batches that the one before them can stand for.

    All are traced of several GPUs, as communication overlaps from one micro-batch to the next, and of pairs,
    as the means of all micro-batches are kept until the update.
    """
    if recipe.hardware.count > 1 or recipe.objective.name != "pretrain":
        return range(0)
    return range(TRACED - 1, recipe.batch.accumulate - 1)
