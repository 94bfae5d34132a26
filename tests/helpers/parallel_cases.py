"""Processes of one gloo group, and training on each rank compared with one process and the whole batch."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
import weakref
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainfit.measurement.process import die_with_parent
from trainfit.parallel import DataParallel, FullySharded, ShardedOptimizer, collectives
from trainfit.parallel.collectives import all_reduce

BATCH = 8
STEPS = 3


class Ranks:
    """``world_size`` processes of one gloo group; each keeps its imports from one call to the next."""

    def __init__(self, world_size: int):
        # A fork has nothing to import, but no autograd of its own where there is a GPU.
        context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            here, there = context.Pipe()
            arguments = (there, store, rank, world_size, os.getpid())
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return what the function returns on each rank; an exception fails with its traceback."""
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        answers = [pipe.recv() for pipe in self._pipes]
        for rank, (failure, _) in enumerate(answers):
            assert failure is None, f"rank {rank}: {failure}"
        return [result for _, result in answers]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _serve(pipe: Any, store: Path, rank: int, world_size: int, parent: int) -> None:
    die_with_parent(parent)
    gc.freeze()  # A collection that visited the parent's objects would copy all of its memory.
    torch.manual_seed(0)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size
    )
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            answer = (None, function(*args, **kwargs))
        except BaseException:
            answer = (traceback.format_exc(), None)
        pipe.send(answer)


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


def ddp() -> float:
    """Return torch's own wrapper's difference from one process, under the same harness."""
    module = DistributedDataParallel(Tied(dist.get_rank()))
    stepper = adamw(module.parameters())
    for tokens in batches():
        loss_of(module, shares(tokens)[0]).backward()
        stepper.step()
        stepper.zero_grad()
    return difference(dict(module.module.named_parameters()), alone())


def recipe_losses(fields: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return the losses of three steps of a tiny recipe on all ranks, and of one process on all batches."""
    from torch.distributed.device_mesh import init_device_mesh

    from tiny_recipe import wide_recipe
    from trainfit.spec.recipe import Batch, Hardware, Parallel, Recipe
    from trainfit.step import assemble

    num_ranks, cpu = dist.get_world_size(), torch.device("cpu")
    base = wide_recipe(2, batch=Batch(micro=1, seq=16)).content()
    recipe = Recipe.model_validate(base | {"hardware": Hardware(gpu="h200", count=num_ranks)} | fields)
    sizes = recipe.mesh.dimensions
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    step = assemble(recipe, cpu, mesh=mesh)
    losses = []
    for number in range(STEPS):
        loss = step(step.random_batches(10 * number))
        dist.all_reduce(loss)
        losses.append(loss.item() / num_ranks)
    alone = recipe.model_copy(
        update={
            "hardware": Hardware(gpu="h200"),
            "parallel": Parallel(),
            "batch": Batch(micro=1, seq=16, accumulate=num_ranks),
        }
    )
    whole = assemble(alone, cpu)
    own = assemble(alone.model_copy(update={"batch": Batch(micro=1, seq=16)}), cpu)
    expected = []
    for number in range(STEPS):
        batches = [own.random_batches(10 * number + rank)[0] for rank in range(num_ranks)]
        expected.append(whole(batches).item())
    return losses, expected
