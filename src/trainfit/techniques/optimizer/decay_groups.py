"""Weight decay groups: norms, biases or embeddings in a group of their own, without weight decay.

``[norms, biases]`` is the rule of the Hugging Face Trainer (``get_decay_parameter_names``): layers of class
LayerNorm, and parameters whose names say norm or bias. An update launches the optimizer's kernels for each
group.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Technique, refusal
from trainfit.techniques.draft import Draft

if TYPE_CHECKING:
    from torch import nn

NORM = re.compile(r"layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
BIAS = re.compile(r"bias")


def kind_of(module: nn.Module, name: str) -> str:
    """Return ``norms``, ``biases``, ``embeddings`` or, of any other parameter, ``weights``.

    Args:
        module: that holds the parameter.
        name: the parameter's dotted name in the model.
    """
    from torch import nn

    if BIAS.search(name.lower()):
        return "biases"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) or NORM.search(name.lower()):
        return "norms"
    return "embeddings" if isinstance(module, nn.Embedding) else "weights"


def kinds_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the kind of each parameter; a tied one has that of its first module, the embedding."""
    found: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(name, recurse=False):
            found.setdefault(parameter, kind_of(module, own))
    return found


def check(recipe: Recipe) -> None:
    """Refuse groups where no weight decays."""
    if not recipe.optimizer.weight_decay:
        problem = "no weight decays: optimizer.weight_decay is 0"
        raise refusal(recipe, "optimizer.no_decay", problem, "leave it out, or set a weight decay")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Split the parameters of each optimizer into those with weight decay and those without."""
    known: dict[nn.Parameter, str] = {}

    def groups(parameters: list[nn.Parameter]) -> list[Any]:
        if not all(parameter in known for parameter in parameters):  # Sharding may have replaced them.
            known.update(kinds_of(draft.model))
        without = [one for one in parameters if known[one] in recipe.optimizer.no_decay]
        apart = set(without)
        decaying = [one for one in parameters if one not in apart]
        found: list[dict[str, Any]] = [{"params": decaying}, {"params": without, "weight_decay": 0.0}]
        return [group for group in found if group["params"]]

    draft.groups = groups


TECHNIQUE = Technique(
    name="decay_groups",
    order=295,
    title="Weight decay groups",
    fields=("optimizer.no_decay",),
    check=check,
    apply=apply,
    when=lambda recipe: bool(recipe.optimizer.no_decay),
    describe=lambda recipe: f"no decay of {' and '.join(recipe.optimizer.no_decay)}",
    examples=({"optimizer": {"no_decay": ["norms", "biases"]}},),
    draw=Draw(alone=lambda chance, _: {"optimizer": {"no_decay": ["norms", "biases"]}}),
)
