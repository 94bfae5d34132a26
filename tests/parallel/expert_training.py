"""A recipe of a tiny mixture of experts on the ranks of this process's group, against one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tiny_recipe import tiny_experts
from trainfit import step as steps
from trainfit.spec.recipe import Batch, Hardware, Optimizer, Parallel, Recipe
from trainfit.step import Step, assemble

FAMILIES: dict[str, dict[str, Any]] = {
    "olmoe": {},
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 8, "sliding_window": 8},
    "deepseek_v2": {},
    "deepseek_v3": {},
}
for _family in ("deepseek_v2", "deepseek_v3"):
    FAMILIES[_family] = {
        "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "topk_method": "greedy",
    }  # fmt: skip
STEPS = 2


def experts_recipe(family: str, count: int, mesh: dict[str, Any], **fields: Any) -> Recipe:
    """1 x 16 tokens a micro-batch, unless ``fields`` say otherwise."""
    place = {"hardware": Hardware(gpu="h200", count=count), "parallel": Parallel(**mesh)}
    config = {"model_type": family, **FAMILIES[family]}
    return tiny_experts(config, **{"batch": Batch(micro=1, seq=16), **place, **fields})


def apart(family: str, mesh: dict[str, Any], fields: dict[str, Any], one_sided: bool = False) -> float:
    """Return the largest difference from one process that reads all ranks' batches.

    Of losses and norms of gradients, and of each gradient's elements over its largest one in the first step:
    later ones follow Adam's first update, which depends on the signs of gradients near zero.

    Args:
        one_sided: every token chooses the same experts, so that the other ranks compute nothing.
    """
    count, cpu = dist.get_world_size(), torch.device("cpu")
    fields = {"optimizer": Optimizer(clip_norm=0.05), **fields}
    recipe = experts_recipe(family, count, mesh, **fields)
    sizes = recipe.mesh.dimensions
    device_mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    with equal_scores() if one_sided else patch.object(steps, "_build", steps._build):
        ours = assemble(recipe, cpu, mesh=device_mesh)
        one = recipe.batch.model_copy(update={"accumulate": count * recipe.batch.accumulate})
        whole = assemble(experts_recipe(family, 1, {}, **{**fields, "batch": one}), cpu)
    worst = 0.0
    for number in range(STEPS):
        batches = ours.random_batches(10 * number)
        every: list[Any] = [None] * count
        dist.all_gather_object(every, batches)
        loss, gradients = stepped(ours, batches)
        dist.all_reduce(loss)
        expected_loss, expected = stepped(whole, [batch for some in every for batch in some])
        assert gradients.keys() == expected.keys()
        differences = [loss / count - expected_loss]
        for name, reading in whole.readings.items():
            differences.append(ours.readings[name] / reading - 1)
        if number == 0:
            for name, gradient in expected.items():
                largest = gradient.abs().max().clamp(min=1e-12)
                differences.append((gradients[name] - gradient).abs().max() / largest)
        worst = max(worst, *(difference.abs().item() for difference in differences))
    return worst


def stepped(step: Step, batches: list[dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a step; return its loss and each parameter's whole gradient before it is clipped."""
    found: dict[str, Tensor] = {}

    def on_phase(phase: str) -> None:
        for name, parameter in step.model.named_parameters() if phase == "optimizer" else ():
            gradient: Any = parameter.grad
            found[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()

    return step(batches, on_phase=on_phase), found


@contextmanager
def equal_scores() -> Iterator[None]:
    """Build models whose routers score all experts alike."""
    build = steps._build

    def built(*args: Any) -> tuple[nn.Module, Any]:
        model, hosted = build(*args)
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.detach().zero_()
        return model, hosted

    with patch.object(steps, "_build", built):
        yield
