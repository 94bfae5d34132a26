"""Preferences small enough for tests."""

import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from trainfit.spec.parsing.recipe_file import merge, recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.step import Batch, assemble
from trainfit.training.log import JsonlLog
from trainfit.training.loop import train
from trainfit.training.options import TrainOptions

MODEL = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64,
}  # fmt: skip
BASE: dict[str, Any] = {
    "model": {"config": MODEL, "implementation": "native", "name": "tiny"}, "batch": {"micro": 2, "seq": 16},
    "precision": "fp32", "objective": {"name": "dpo"}, "hardware": {"gpu": "cpu"},
    "optimizer": {"implementation": "foreach", "lr": 1e-2},
}  # fmt: skip
LORA = {"adapter": {"kind": "lora", "rank": 4}}


def preference(**fields: Any) -> Recipe:
    return recipe_from(merge(BASE, fields))


def batches_of(recipe: Recipe, ranks: int = 1, rank: int = 0, seed: int = 0) -> list[Batch]:
    """Micro-batches of pairs of several lengths; each rank has its share."""
    generator = torch.Generator().manual_seed(seed)
    pairs = recipe.batch.micro * recipe.batch.accumulate * ranks
    ids = torch.randint(recipe.model.config["vocab_size"], (2 * pairs, 16), generator=generator)  # type: ignore
    begins = torch.randint(1, 8, (pairs,), generator=generator).repeat_interleave(2)
    ends = torch.randint(9, 17, (2 * pairs,), generator=generator)
    places = torch.arange(16)
    labels = ids.masked_fill((places < begins[:, None]) | (places >= ends[:, None]), -100)
    mine = slice(2 * pairs // ranks * rank, 2 * pairs // ranks * (rank + 1))
    parts = zip(
        ids[mine].split(recipe.micro_sequences), labels[mine].split(recipe.micro_sequences), strict=True
    )
    return [{"input_ids": one, "labels": of} for one, of in parts]


def answer_logs(model: Any, batch: Batch) -> Tensor:
    """Log-probability of each answer, from whole logits."""
    logs = model(batch["input_ids"]).logits[:, :-1].float().log_softmax(-1)
    labels = batch["labels"][:, 1:]
    found = logs.gather(2, labels.clamp(min=0)[..., None])[..., 0]
    return (found * (labels >= 0)).sum(dim=1)


def reference_logs(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        return answer_logs(model, batch)


def stepped(fields: dict[str, Any]) -> dict[str, Any]:
    """Losses of three steps, and rewards of other pairs after them; on each rank of a group, or alone."""
    recipe = preference(**fields)
    mesh, ranks, rank = None, 1, 0
    if dist.is_initialized():
        sizes = recipe.mesh.dimensions
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        ranks, rank = dist.get_world_size(), dist.get_rank()
    step = assemble(recipe, torch.device("cpu"), mesh=mesh)
    losses = [step(batches_of(recipe, ranks, rank, seed)).item() for seed in range(3)]
    return {
        "losses": losses, "means": step.readings["pair_means"].mean(dim=0),
        "held out": step.preferences(batches_of(preference(), seed=9)[0]),
    }  # fmt: skip


def write_pairs(path: Path, rows: int = 60) -> Path:
    """Sums whose answers end with a full stop, or with an exclamation mark."""
    chance = random.Random(0)
    with path.open("w") as file:
        for _ in range(rows):
            a, b = chance.randint(0, 9), chance.randint(0, 9)
            row = {"prompt": f"{a}+{b}=", "chosen": f"{a + b}.", "rejected": f"{a + b}!"}
            file.write(json.dumps(row) + "\n")
    return path


def options_for(out: Path, data: Path, steps: int, **more: Any) -> TrainOptions:
    given = {"out": str(out), "steps": steps, "device": "cpu", "eval_fraction": 0.3, "eval_sequences": 8}
    return TrainOptions(**given, data={"kind": "text", "path": str(data)}, **more)  # type: ignore[arg-type]


def trained(out: Path, data: Path, steps: int, fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    summary = train(preference(**fields), options_for(out, data, steps, **more), observers=[JsonlLog()])
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {"status": summary.status, "losses": summary.losses, "log": lines}
