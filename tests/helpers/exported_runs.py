"""Tiny runs that are exported, and the logits of what they trained."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiny_training import options_for, tiny
from trainfit.models.weights.layout import layout
from trainfit.spec.recipe import Recipe
from trainfit.step import assemble
from trainfit.training import checkpoint
from trainfit.training.export.saved_run import open_saved
from trainfit.training.log import JsonlLog
from trainfit.training.loop import train

CPU = torch.device("cpu")
IDS = torch.randint(0, 384, (2, 24), generator=torch.Generator().manual_seed(5))


def trained(out: Path, *settings: str, config: dict, steps: int = 2, **more: Any) -> Recipe:
    """Train a tiny model and return its recipe."""
    recipe = tiny(*settings, config=config)
    options = options_for(out, steps, **{"eval_fraction": 0.0} | more)
    train(recipe, options, observers=[JsonlLog()])
    return recipe


def logits_of_run(out: Path, *, recipe: Recipe | None = None) -> Tensor:
    """Return the logits of the run's own model, with the checkpoint loaded, for ``IDS``.

    Args:
        recipe: on one GPU, where the run's is for several.
    """
    run = open_saved(out, None)
    step = assemble(recipe or run.recipe, CPU, reads_weights=False)
    checkpoint.load(run.checkpoint, step)
    return logits_of(step.model)


def logits_of(model: Any) -> Tensor:
    """Return a model's logits of ``IDS``, those of virtual tokens left out."""
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()[:, -IDS.shape[1] :]


def base_of(recipe: Recipe) -> Any:
    """Return transformers' model with the weights with which a recipe's base begins."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own = assemble(recipe.model_copy(update={"adapter": None, "quantize": None}), CPU).model
    assert isinstance(recipe.model.config, dict)
    config: Any = AutoConfig.for_model(**recipe.model.config)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = own.state_dict()
    model.load_state_dict({one.name: one.of(state[one.parameter]) for one in layout(own)}, strict=False)
    model.tie_weights()
    return model
