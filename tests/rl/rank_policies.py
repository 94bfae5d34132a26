"""Policies on each process of ``rank_processes.Ranks``."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tiny_policies import options_for, policy, rollouts_in, trained
from trainfit.rl.rollout import phases
from trainfit.rl.rollout.generate import Generator
from trainfit.spec.parsing.recipe_file import merge, recipe_from
from trainfit.step import assemble

MODEL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64,
}  # fmt: skip
BASE: dict[str, Any] = {
    "model": {"config": MODEL, "implementation": "native"}, "batch": {"micro": 2, "seq": 16},
    "precision": "fp32", "hardware": {"gpu": "cpu"},
    "objective": {"name": "grpo", "kl": 0.1, "max_prompt": 8, "max_new": 8, "group": 2, "prompts": 2},
    "optimizer": {"implementation": "foreach", "lr": 1e-2},
}  # fmt: skip
PROMPTS = [[5, 6, 7], [11], [1, 2, 3, 4, 5, 6, 7, 8]]


def phases_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Generate, score, update and score; every rank does the same."""
    recipe = recipe_from(merge(BASE, fields))
    sizes = recipe.mesh.dimensions
    mesh = None
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    step = assemble(recipe, torch.device("cpu"), mesh=mesh)
    ids = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(1))
    with phases.generating(step):
        completions = phases.generator_of(step, phases.sampling_of(recipe, ()))(PROMPTS)
    found: dict[str, Any] = {"tokens": [one.tokens for one in completions]}
    for when in ("", " after an update"):
        found[f"own{when}"] = phases.score(step, ids)[:, :-1]
        found[f"reference{when}"] = phases.score(step, ids, reference=True)[:, :-1]
        batch = {"input_ids": ids, "labels": ids, "old": phases.score(step, ids)}
        batch |= {"reference": found[f"reference{when}"].new_zeros(ids.shape) - 4}
        batch |= {"advantages": torch.ones(ids.shape), "weights": torch.full(ids.shape, 1 / ids.numel())}
        batch["weights"][:, -1] = 0
        step([batch])
    return found


def trained_policy(
    out: Path, steps: int, fields: dict[str, Any], *, signal_in: int | None = None, **more: Any
) -> dict[str, Any]:
    """Train a policy; ``signal_in``: the rollout (from 1) in which rank 1 gets SIGTERM while it generates."""
    plain, begun, generated = Generator.completions, [], []

    def signalled(self: Generator, *arguments: Any) -> Any:
        begun.append(1)
        if dist.is_initialized() and dist.get_rank() == 1 and len(begun) == signal_in:
            os.kill(os.getpid(), signal.SIGTERM)
        generated.append(0)
        for completion in plain(self, *arguments):
            generated[-1] += 1
            yield completion

    Generator.completions = signalled  # pyright: ignore[reportAttributeAccessIssue]
    try:
        summary = trained(policy(**fields), options_for(out, steps, **more))
    finally:
        Generator.completions = plain
    return {
        "status": summary.status, "steps": summary.steps, "losses": summary.losses,
        "reward": summary.eval_reward, "rollouts": rollouts_in(out),
        "generated": generated,
    }  # fmt: skip
