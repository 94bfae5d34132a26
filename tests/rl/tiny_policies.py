"""Policies small enough for tests."""

import json
from pathlib import Path
from typing import Any

from trainfit.rl.loop import rollouts_of
from trainfit.spec.parsing.recipe_file import merge, recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.training.log import JsonlLog, RolloutLog
from trainfit.training.loop import train
from trainfit.training.observer import TrainSummary
from trainfit.training.options import TrainOptions

MODEL = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 64,
    "initializer_range": 0.2,
}  # fmt: skip
DIGITS = Path(__file__).parent / "digits.py"
GRPO: dict[str, Any] = {
    "name": "grpo", "environment": f"{DIGITS}:Digits", "group": 4, "prompts": 2, "max_prompt": 8,
    "max_new": 6, "kl": 0.1, "reference": "copy", "updates_per_rollout": 2,
    "rollout": {"kv_cache": "fp32", "batch": 3},
}  # fmt: skip
BASE: dict[str, Any] = {
    "model": {"config": MODEL, "implementation": "native", "name": "tiny"},
    "batch": {"micro": 2, "accumulate": 2, "seq": 16},
    "precision": "fp32", "hardware": {"gpu": "cpu"}, "objective": GRPO,
    "optimizer": {"implementation": "foreach", "lr": 1e-2},
}  # fmt: skip


def policy(**fields: Any) -> Recipe:
    """Two rollouts' steps of 4 completions: ``updates_per_rollout`` is 2."""
    return recipe_from(merge(BASE, fields))


def options_for(out: Path, steps: int, **more: Any) -> TrainOptions:
    return TrainOptions(**{"out": str(out), "steps": steps, "eval_sequences": 3, "device": "cpu", **more})


def trained(recipe: Recipe, options: TrainOptions, *observers: Any) -> TrainSummary:
    logs = [JsonlLog(), RolloutLog()]
    return train(recipe, options, observers=[*logs, *observers], rollouts=rollouts_of(recipe))


def rollouts_in(out: Path) -> list[dict[str, Any]]:
    """Lines of the log of rollouts, without times."""
    lines = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.endswith("_s")} for line in lines]
