"""Steps with an adapter over several tensor-parallel ranks, and on one process."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tiny_recipe import tiny_recipe
from trainfit.parallel.tensor_parallel import fused_parts, in_order, share
from trainfit.spec.recipe import Hardware, Parallel, Recipe
from trainfit.step import Step, assemble

CPU = torch.device("cpu")


def compile_whole(module: nn.Module) -> None:
    """Compile without Inductor; a break of the graph is an error."""
    module.compile(backend="aot_eager", fullgraph=True)


def whole(value: Any, parts: tuple[int, ...]) -> Tensor:
    """Return a whole tensor, in the model's order."""
    if not isinstance(value, DTensor):
        return value
    local, mesh = value.to_local(), value.device_mesh
    codes = local.view(torch.uint8) if local.dtype.itemsize == 1 else local  # gloo gathers no fp8.
    full = DTensor.from_local(codes, mesh, value.placements, run_check=False).full_tensor()
    full = full.view(local.dtype)
    return in_order(full, value.device_mesh.size(), parts) if parts else full


def assembled(recipe: Recipe, device: torch.device) -> Step:
    """Return the step on this process, whose adapters' products are not 0 as they are at first."""
    sizes = recipe.mesh.dimensions
    mesh = (
        init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if recipe.hardware.count > 1
        else None
    )
    compiler = compile_whole if device == CPU else None
    step = assemble(recipe, device, compiler=compiler, mesh=mesh)
    parts, generator = fused_parts(step.model), torch.Generator().manual_seed(1)
    for name, parameter in step.model.named_parameters():
        if "lora_B" in name:
            full = torch.randn(parameter.shape, generator=generator).to(device, parameter.dtype) * 0.1
            with torch.no_grad():
                if isinstance(parameter, DTensor):
                    (placement,) = parameter.placements
                    full = share(full, parameter.device_mesh, placement, parts.get(name, ()))
                    parameter.to_local().copy_(full)
                else:
                    parameter.copy_(full)
    return step


def loss_and_tensors(step: Step) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Return the first step's loss, the whole gradients, and all tensors of the model before it."""
    parts = fused_parts(step.model)
    state = {name: whole(one, parts.get(name, ())).clone() for name, one in step.model.state_dict().items()}
    gradients: dict[str, Tensor] = {}

    def on_phase(phase: str) -> None:
        if phase == "optimizer":
            for name, parameter in step.model.named_parameters():
                if parameter.requires_grad:
                    gradients[name] = whole(parameter.grad, parts.get(name, ()))

    loss = step(step.random_batches(), on_phase=on_phase).item()
    return loss, gradients, state


def apart(
    implementation: str,
    config: dict[str, Any],
    fields: dict[str, Any],
    count: int,
    device: torch.device = CPU,
) -> tuple[float, float, float]:
    """Return the largest differences between ``count`` ranks and one process.

    Of the first loss; of each adapter gradient, relative to its norm; and of all tensors at the start.
    """
    recipe = tiny_recipe(implementation, **fields)
    model = recipe.model.model_copy(update={"config": {**dict(recipe.model.config), **config}})  # pyright: ignore
    alone = recipe.model_copy(update={"model": model})
    update = {"hardware": Hardware(gpu="h200", count=count), "parallel": Parallel(tensor=count)}
    loss, gradients, state = loss_and_tensors(assembled(alone, device))
    found, found_gradients, found_state = loss_and_tensors(assembled(alone.model_copy(update=update), device))
    assert found_gradients.keys() == gradients.keys()
    assert found_state.keys() == state.keys()
    return (
        abs(found - loss),
        max(float((found_gradients[name] - one).norm() / one.norm()) for name, one in gradients.items()),
        max(float((found_state[name].float() - one.float()).abs().max()) for name, one in state.items()),
    )
