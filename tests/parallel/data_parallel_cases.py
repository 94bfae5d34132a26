"""Training on each rank of a group, compared with one process and the whole batch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainfit.parallel import DataParallel, collectives
from trainfit.parallel.collectives import all_reduce

BATCH = 8
STEPS = 3


class Tied(nn.Module):
    """An embedding tied to the head, a frozen layer, odd sizes and a buffer."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 6)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 11)
        self.frozen = nn.Linear(11, 6).requires_grad_(False)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(1.0 + seed))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embed(tokens))
        return self.head(self.frozen(torch.relu(self.up(hidden))) * self.scale)


class Skipping(Tied):
    """Also has one layer that only odd ranks use, and one that no rank uses."""

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self.sometimes = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens)
        odd = tokens.shape[0] == BATCH or dist.get_rank() % 2 == 1
        if not odd:
            return out
        extra = self.head(self.sometimes(self.embed(tokens)))
        rows = tokens.shape[0] // 2 if tokens.shape[0] == BATCH else 0
        return out + torch.cat([torch.zeros_like(extra[:rows]), extra[rows:]])


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 13, (BATCH, 5), generator=generator) for _ in range(STEPS)]


def loss_of(module: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=True)


def alone(
    make: Callable[[int], nn.Module] = Tied, optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
) -> dict[str, Tensor]:
    """Return the parameters after ``STEPS`` steps of one process on the whole batch."""
    module = make(0)
    stepper = optimizer(module.parameters())
    for tokens in batches():
        loss_of(module, tokens).backward()
        stepper.step()
        stepper.zero_grad()
    return {name: one.detach() for name, one in module.named_parameters()}


def shares(tokens: Tensor, accumulate: int = 1) -> list[Tensor]:
    """Return this rank's part of a batch, in ``accumulate`` micro-batches."""
    own = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    return list(own.chunk(accumulate))


def difference(named: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert named.keys() == expected.keys()
    return max((named[name].detach() - one).abs().max().item() for name, one in expected.items())


def data_parallel(strategy: str, accumulate: int = 1, model: type[nn.Module] = Tied, **options: Any) -> float:
    """Return the largest difference from one process's parameters; ranks begin with other weights."""
    wrapper = DataParallel(model(dist.get_rank()), strategy, **options)
    stepper = adamw(wrapper.module.parameters())
    for tokens in batches():
        parts = shares(tokens, accumulate)
        with wrapper.no_sync():
            for part in parts[:-1]:
                (loss_of(wrapper, part) / accumulate).backward()
        (loss_of(wrapper, parts[-1]) / accumulate).backward()
        wrapper.wait_for_gradients()
        stepper.step()
        stepper.zero_grad()
    return difference(dict(wrapper.module.named_parameters()), alone(model))


def collectives_of(strategy: str, **options: Any) -> tuple[list[int], int]:
    """Return the bytes of each all-reduce of a step, and how many began before the backward ended."""
    wrapper = DataParallel(Tied(), strategy, **options)
    begun: list[int] = []

    def recorded(tensors: list[Tensor], *args: Any) -> Any:
        begun.append(sum(tensor.nbytes for tensor in tensors))
        return all_reduce(tensors, *args)

    with patch.object(collectives, "all_reduce", recorded):
        loss_of(wrapper, shares(batches()[0])[0]).backward()
        in_backward = len(begun)
        wrapper.wait_for_gradients()
    return begun, in_backward


def places_of_gradients(strategy: str) -> tuple[bool, int]:
    """Return whether averaging left each gradient where the backward put it, and the storages of all."""
    wrapper = DataParallel(Tied(), strategy)
    with wrapper.no_sync():
        loss_of(wrapper, shares(batches()[0])[0]).backward()
    gradients = [one.grad for one in wrapper.parameters() if one.requires_grad]
    before = [one.data_ptr() for one in gradients]
    wrapper.wait_for_gradients()
    after = [one.grad for one in wrapper.parameters() if one.requires_grad]
    storages = {one.untyped_storage().data_ptr() for one in after}
    return before == [one.data_ptr() for one in after], len(storages)


def memory_is_freed(strategy: str) -> bool:
    """Return whether a wrapper that is dropped leaves nothing of its module behind."""
    module = Tied()
    wrapper = DataParallel(module, strategy)  # pyright: ignore[reportArgumentType]
    loss_of(wrapper, shares(batches()[0])[0]).backward()
    wrapper.wait_for_gradients()
    kept = [weakref.ref(parameter) for parameter in module.parameters()]
    del module, wrapper
    gc.collect()
    return not any(one() is not None for one in kept)


def message_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return ""


def a_missing_gradient() -> str:
    wrapper = DataParallel(Skipping(), "flat")
    loss_of(wrapper, shares(batches()[0])[0]).backward()
    return message_of(wrapper.wait_for_gradients)


def a_second_backward() -> str:
    wrapper = DataParallel(Tied(), "overlapped")
    (part,) = shares(batches()[0])
    loss_of(wrapper, part).backward()
    message = message_of(lambda: loss_of(wrapper, part).backward())
    wrapper.wait_for_gradients()
    return message


def ddp() -> float:
    """Return torch's own wrapper's difference from one process, under the same harness."""
    module = DistributedDataParallel(Tied(dist.get_rank()))
    stepper = adamw(module.parameters())
    for tokens in batches():
        loss_of(module, shares(tokens)[0]).backward()
        stepper.step()
        stepper.zero_grad()
    return difference(dict(module.module.named_parameters()), alone())
