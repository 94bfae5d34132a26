"""Convert a step's state to named tensors and plain data, and back, bit for bit.

Tensors are the model's by name and the optimizers' as ``PARAMETER/KEY``. The rest is JSON: tied weights,
groups and scalars of the optimizers, the loss scaler, and the random generators of torch, Python and NumPy.
Nothing is pickled, so loading a file runs no code.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainfit.models.layers import code_names, code_parameters
from trainfit.offload.blocks import is_moment
from trainfit.parallel.sharded_optimizer import ShardedOptimizer
from trainfit.spec.errors import InputError
from trainfit.step import Step
from trainfit.techniques import registry
from trainfit.training import saved_state
from trainfit.training.saved_state import OptimizerPlain, RandomPlain, unlike
from trainfit.training.shards import laid_out_as, local

Tensors = Mapping[str, Tensor]


def model_tensors(step: Step) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return parameters and buffers, each storage once, and for every tied name the one that it shares."""
    kept: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in step.model.state_dict().items():
        key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.numel() and key in first:
            shared[name] = first[key]
            continue
        first[key] = name
        kept[name] = tensor
    return kept, shared


def model_shards(step: Step) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return ``model_tensors`` of several ranks: the same names on every rank, sharded tensors unchanged."""
    first: dict[int, str] = {}
    named = (step.model.named_parameters, step.model.named_buffers)
    tied = {
        name: first.setdefault(id(tensor), name)
        for tensors in named
        for name, tensor in tensors(remove_duplicate=False)
    }
    kept = step.model.state_dict()
    shared = {name: tied[name] for name in kept if tied.get(name, name) != name}
    return {name: tensor for name, tensor in kept.items() if name not in shared}, shared


def load_model(step: Step, tensors: Tensors, shared: Mapping[str, str]) -> None:
    """Copy ``tensors`` into the model; InputError unless names, shapes and dtypes are the model's."""
    own = step.model.state_dict()
    check_names(set(own), set(tensors) | set(shared))
    codes = code_names(step.model)
    for name, tensor in own.items():
        source = shared.get(name, name)
        if source not in tensors:
            raise unlike(name, f"shares {source}, which is not in the checkpoint")
        saved = tensors[source]
        if name in codes and saved.dtype != tensor.dtype:
            saved = saved.view(tensor.dtype)  # Sharded codes have another dtype than whole ones.
        check_form(name, tensor, saved.shape, saved.dtype)
        with torch.no_grad():
            local(tensor).copy_(local(laid_out_as(tensor, saved)))


def check_names(own: AbstractSet[str], saved: AbstractSet[str]) -> None:
    """Refuse a checkpoint with other tensors than the model's."""
    if different := sorted(own ^ saved):
        raise unlike(different[0], "in only one of checkpoint and model")


def check_form(name: str, own: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    """Refuse a saved tensor of another shape or dtype than the model's."""
    if (shape, dtype) != (own.shape, own.dtype):
        raise unlike(name, f"{dtype} {tuple(shape)}, the model has {own.dtype} {tuple(own.shape)}")


def optimizer_state(step: Step) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizers' tensors by ``PARAMETER/KEY``, and their scalars and groups as plain data."""
    step.settle()
    names = _names(step)
    facts = registry.optimizer_facts(step.recipe.optimizer.name)
    constants = facts.constants if facts else ()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for optimizer in step.optimizers:
        for parameter, values in _states(optimizer).items():
            for key, value in values.items():
                if key in constants:
                    continue
                target = tensors if isinstance(value, Tensor) else scalars
                target[f"{names[id(parameter)]}/{key}"] = value
    groups = [
        [group | {"params": [names[id(one)] for one in group["params"]]} for group in optimizer.param_groups]
        for optimizer in step.optimizers
    ]
    return tensors, {"scalars": scalars, "groups": groups}


def check_optimizer(step: Step, tensors: Tensors, plain: OptimizerPlain) -> None:
    """Raise InputError unless the saved state fits the step's optimizers; nothing is loaded."""
    if [len(groups) for groups in plain.groups] != [len(one.param_groups) for one in step.optimizers]:
        raise unlike("optimizer groups", "other groups than the recipe's")
    parameters: dict[str, Tensor] = {}
    names = _names(step)
    for _, group, saved in _groups(step, plain):
        own = {names[id(parameter)]: parameter for parameter in group["params"]}
        saved_state.check_group(group, saved, list(own))
        parameters |= own
    found: defaultdict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for source in (tensors, plain.scalars):
        for path in source:
            name, _, key = path.rpartition("/")
            if name not in parameters:
                raise unlike(path, "state of a parameter that does not train here")
            found[name][key] = source
    for name, sources in found.items():  # One parameter's tensors are in memory at a time.
        state = {key: source[f"{name}/{key}"] for key, source in sources.items()}
        saved_state.check_parameter_state(step.recipe.optimizer.name, name, parameters[name], state)


def load_optimizer(step: Step, tensors: Tensors, plain: OptimizerPlain) -> None:
    """Load the saved state with its dtypes, which ``Optimizer.load_state_dict`` would change."""
    names, on_host = _names(step), step.parameters_with_host_state()
    owners: dict[str, tuple[Any, dict[str, Any], Tensor]] = {}
    for optimizer, group, saved in _groups(step, plain):
        for key, value in saved.items():
            if key != "params":
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        owners |= {names[id(parameter)]: (optimizer, group, parameter) for parameter in group["params"]}
    for path, value in (*tensors.items(), *plain.scalars.items()):
        name, _, key = path.rpartition("/")
        optimizer, group, parameter = owners[name]
        # An offloaded moment stays on the host (offload/optimizer_state.py).
        stays = id(parameter) in on_host and is_moment(value, parameter)
        _states(optimizer)[parameter][key] = value if stays else _on_device(value, key, group, parameter)


def random_state(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the states of all random generators that a training step on ``device`` may use."""
    tensors = {"host": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    name, keys, *rest = np.random.get_state(legacy=True)
    return tensors, {"python": random.getstate(), "numpy": [name, np.asarray(keys).tolist(), *rest]}


def load_random_state(device: torch.device, tensors: Tensors, plain: RandomPlain) -> None:
    """Set every generator; a run that moves from a CPU to a GPU starts the GPU's anew."""
    version, values, gauss = plain.python
    generator, keys, at, has_gauss, cached = plain.numpy
    try:
        torch.set_rng_state(tensors["host"])
        if device.type == "cuda" and "cuda" in tensors:
            torch.cuda.set_rng_state(tensors["cuda"], device)
        random.setstate((version, tuple(values), gauss))
        np.random.set_state((generator, np.array(keys, dtype=np.uint32), at, has_gauss, cached))
    except (RuntimeError, ValueError, TypeError, KeyError, OverflowError) as error:
        problem = f"not a generator's state ({type(error).__name__})"
        raise InputError(problem, "resume from an older checkpoint", field="random") from None


def first_not_finite(step: Step) -> str | None:
    """Return the name of a parameter that holds NaN or infinity."""
    return next((name for name, is_finite in finite_checks(step) if not is_finite), None)


def finite_checks(step: Step) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter's name, and whether all of it is finite (bool scalar), one at a time."""
    values = step.model.state_dict()  # It has the values of offloaded blocks too.
    codes = code_parameters(step.model)
    for name, parameter in step.model.named_parameters():
        if parameter in codes:
            continue
        value = values.get(name, parameter)
        if value.is_floating_point():
            yield name, torch.isfinite(local(value)).all()


def kept_by_others(step: Step) -> set[str]:
    """Return the names of the parameters whose optimizer state is another rank's."""
    names = _names(step)
    sharded = [one for one in step.optimizers if isinstance(one, ShardedOptimizer)]
    return {names[id(it)] for one in sharded for it, owner in one.owner.items() if owner != one.rank}


def _states(optimizer: Any) -> Any:
    """Return the states that this rank keeps; of a ShardedOptimizer its share."""
    return (optimizer.sharded if isinstance(optimizer, ShardedOptimizer) else optimizer).state


def _names(step: Step) -> dict[int, str]:
    """Return each parameter's name by its ``id``."""
    return {id(parameter): name for name, parameter in step.model.named_parameters()}


def _groups(step: Step, plain: OptimizerPlain) -> Iterator[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Yield each optimizer, a parameter group of its, and the group's saved settings."""
    for optimizer, groups in zip(step.optimizers, plain.groups, strict=True):
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            yield optimizer, group, saved


def _on_device(value: Any, key: str, group: Mapping[str, Any], parameter: Tensor) -> Any:
    """Move state to its parameter's device, but a step count only if a fused kernel reads it."""
    if not isinstance(value, Tensor):
        return value
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    if value.shape == parameter.shape and not isinstance(value, DTensor):
        value = laid_out_as(parameter, value.to(parameter.device))
    return value.to("cpu" if on_host else parameter.device)
