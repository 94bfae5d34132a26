"""Sharded optimizers and parameters on each rank, compared with one process and the whole batch."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel_cases import Tied, adamw, alone, batches, difference, loss_of, shares
from trainfit.parallel import FullySharded, ShardedOptimizer

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
}


def groups_of(module: Tied) -> list[dict[str, Any]]:
    matrices = [one for one in module.parameters() if one.requires_grad and one.ndim > 1]
    vectors = [one for one in module.parameters() if one.requires_grad and one.ndim == 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 5e-3}]


def train_with(stepper: torch.optim.Optimizer, module: nn.Module, steps: list[Tensor]) -> None:
    for tokens in steps:
        loss_of(module, tokens).backward()
        stepper.step()
        stepper.zero_grad()


def sharded_optimizer(name: str) -> tuple[float, float, int]:
    """Return the largest differences of parameters and states from unsharded ones, and the states held."""
    cls, options = OPTIMIZERS[name]
    ours, reference = Tied(), Tied()
    first, second = groups_of(ours)
    stepper = ShardedOptimizer([first], cls, **options)
    stepper.add_param_group(second)
    whole = cls(groups_of(reference), **options)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (stepper, whole)]
    for tokens in batches():
        train_with(stepper, ours, [tokens])
        train_with(whole, reference, [tokens])
        for scheduler in schedulers:
            scheduler.step()
    own, expected = stepper.state_dict(), whole.state_dict()
    assert own["param_groups"] == expected["param_groups"]
    assert own["state"].keys() == expected["state"].keys()
    apart = max(
        (torch.as_tensor(own["state"][index][key]) - torch.as_tensor(value)).abs().max().item()
        for index, state in expected["state"].items()
        for key, value in state.items()
    )
    parameters = difference(dict(ours.named_parameters()), dict(reference.named_parameters()))
    return parameters, apart, len(stepper.sharded.state)


def resharded(world_size: int) -> float:
    """Save at this world size, load at a smaller one; return the difference from training that went on."""
    members = dist.new_group(list(range(world_size)))
    module = Tied()
    stepper = ShardedOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-2)
    first, *rest = batches()
    train_with(stepper, module, [first])
    state = deepcopy(stepper.state_dict())
    copy = Tied()
    copy.load_state_dict(module.state_dict())
    train_with(stepper, module, rest)
    if dist.get_rank() >= world_size:
        return 0.0
    again = ShardedOptimizer(copy.parameters(), torch.optim.AdamW, group=members, lr=1e-2)
    again.load_state_dict(state)
    train_with(again, copy, rest)
    return difference(dict(copy.named_parameters()), dict(module.named_parameters()))


def fully_sharded(by_module: bool, checkpointed: bool = False) -> tuple[float, int, int]:
    """Return the difference from one process, this rank's elements, and those of the whole module."""
    module = Tied(dist.get_rank())
    total = sum(one.numel() for one in module.parameters())
    wrapper = FullySharded(module, () if by_module else (Tied,))
    stepper = adamw(wrapper.parameters())
    for tokens in batches():
        (part,) = shares(tokens)
        if checkpointed:
            inner = torch.utils.checkpoint.checkpoint(wrapper, part[:, :-1], use_reentrant=False)
            loss = nn.functional.cross_entropy(inner.flatten(0, 1), part[:, 1:].flatten())
        else:
            loss = loss_of(wrapper, part)
        loss.backward()
        stepper.step()
        stepper.zero_grad()
    full = wrapper.full_parameters()
    held = sum(one.numel() for one in wrapper.parameters())
    return difference(full, alone()), held, total


def partly_replicated() -> tuple[float, dict[str, int], list[str]]:
    """Accumulate over two backwards a step, warnings as errors, with modules that stay whole.

    Return the difference from one process, the elements held by name, and the message of a wrong name.
    """
    module = Tied(dist.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapper = FullySharded(module, replicated=["norm", "head"])
        stepper = adamw(wrapper.parameters())
        for tokens in batches():
            (part,) = shares(tokens)
            for half in part.chunk(2):
                (loss_of(wrapper, half) / 2).backward()
            stepper.step()
            stepper.zero_grad()
        full = wrapper.full_parameters()
    held = {name: one.numel() for name, one in wrapper.module.named_parameters()}
    messages = []
    try:
        FullySharded(nn.Linear(2, 2), replicated=["norm"])
    except ValueError as error:
        messages.append(str(error))
    return difference(full, alone()), held, messages


def saved_by(compute_dtype: torch.dtype | None) -> tuple[int, int, set[torch.dtype]]:
    """Return the bytes that a linear layer saves for its backward, whole and sharded, and its dtypes."""
    kept: list[int] = []
    dtypes: set[torch.dtype] = set()

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage().nbytes())
        return tensor

    def bytes_of(module: nn.Module) -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = module(torch.ones(2, 64, dtype=compute_dtype or torch.float32, requires_grad=True))
            dtypes.add(out.dtype)
            out.sum().backward()
        return sum(kept)

    plain = bytes_of(nn.Linear(64, 64, bias=False, dtype=compute_dtype))
    wrapper = FullySharded(nn.Linear(64, 64, bias=False), compute_dtype=compute_dtype)
    sharded = bytes_of(wrapper)
    (shard,) = wrapper.parameters()
    assert shard.grad is not None
    assert shard.grad.dtype == torch.float32
    return plain, sharded, dtypes
