"""Fully sharded parameters: gathered before use, freed after, gradients reduce-scattered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks  # pyright: ignore[reportMissingModuleSource]
from torch.autograd.graph import saved_tensors_hooks

from trainfit.parallel.collectives import Average, Group, all_gather, broadcast, can_average, reduce_scatter


class Layout(NamedTuple):
    """How a parameter is cut: flattened, padded with zeros, one equal chunk a rank."""

    shape: torch.Size
    world_size: int
    group: Group
    compute_dtype: torch.dtype | None

    @property
    def chunk(self) -> int:
        """Elements of one rank."""
        return -(-self.shape.numel() // self.world_size)

    def shard(self, full: Tensor) -> Tensor:
        """Return this rank's chunk of a full tensor."""
        flat = full.new_zeros(self.chunk * self.world_size)
        flat[: full.numel()] = full.flatten()
        return flat.chunk(self.world_size)[dist.get_rank(self.group)].clone()

    def gather(self, shard: Tensor) -> Tensor:
        """Return the full tensor in the compute dtype; a collective."""
        shard = shard.detach().to(self.compute_dtype or shard.dtype)
        full = shard.new_empty(self.chunk * self.world_size)
        all_gather(full, shard, self.group)
        return full[: self.shape.numel()].view(self.shape)

    def reduce_scatter(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Return this rank's chunk of the gradient's mean over the group; a collective."""
        flat = gradient.new_zeros(self.chunk * self.world_size, dtype=dtype)
        flat[: gradient.numel()] = gradient.flatten()
        chunk = flat.new_empty(self.chunk)
        averages = can_average(flat, self.group)
        op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        reduce_scatter(chunk, flat, self.group, op)
        return chunk if averages else chunk.div_(self.world_size)


class _Gather(torch.autograd.Function):
    """Shard -> full parameter; its gradient is reduce-scattered in the shard's dtype."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, layout: Layout) -> Tensor:
        ctx.layout, ctx.dtype = layout, shard.dtype
        return layout.gather(shard)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.reduce_scatter(gradients[0], ctx.dtype), None


class _Saved(NamedTuple):
    """A view of a full parameter that an operation saved for its backward: only where to get it again."""

    shard: nn.Parameter
    layout: Layout
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        return self.layout.gather(self.shard).as_strided(self.size, self.stride, self.offset)


class Unit:
    """One module whose parameters are full only while its forward runs.

    Its parameters become flat shards of the same names. What the forward's operations save of the full
    parameters is gathered again, one at a time, when the backward needs it.
    """

    def __init__(
        self, module: nn.Module, names: list[tuple[nn.Module, str]], layouts: dict[nn.Parameter, Layout]
    ):
        self.names = names
        self.layouts = layouts
        self._forward: Callable[..., Any] = module.forward
        functools.update_wrapper(self, module.forward)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        full = {}
        for owner, name in self.names:
            shard = owner._parameters[name]
            assert shard is not None
            if shard not in full:
                full[shard] = _Gather.apply(shard, self.layouts[shard])
            # An attribute of the instance hides the parameter of the same name.
            owner.__dict__[name] = full[shard]
        shards = {tensor.untyped_storage()._cdata: shard for shard, tensor in full.items()}
        outer = _top_saved_tensors_default_hooks(True)  # Only the innermost hooks run.

        def pack(tensor: Tensor) -> Any:
            shard = shards.get(tensor.untyped_storage()._cdata)
            if shard is not None:
                return _Saved(
                    shard,
                    self.layouts[shard],
                    tuple(tensor.size()),
                    tensor.stride(),
                    int(tensor.storage_offset()),
                )
            return tensor.detach() if outer is None else outer[0](tensor)

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, _Saved):
                return saved.tensor()
            return saved if outer is None else outer[1](saved)

        try:
            with saved_tensors_hooks(pack, unpack):
                return self._forward(*args, **kwargs)
        finally:
            for owner, name in self.names:
                owner.__dict__.pop(name, None)


class FullySharded(nn.Module):
    """Shard a module's parameters, gradients and optimizer state over a process group.

    ``parameters()`` yields this rank's shards, flat, and the replicated parameters, under the names that they
    had: hand them to any element-wise optimizer. Gradients are ready when the backward returns.

    Args:
        module: Any module on one device, tied and frozen parameters included. The parameters and buffers of
            the group's first rank are copied to all.
        units: Types of submodules that are gathered as one; default: each module that holds parameters
            itself. Parameters outside of every unit are full during the whole forward.
        compute_dtype: Dtype of gathered parameters; default: that of the shards. Gradients are reduced in
            the dtype of the shards.
        group: The process group; None: the default group.
        replicated: Names of submodules whose parameters stay whole, in their own dtype, on every rank: such
            as norms, which a gather each would cost more than they take. Their gradients are averaged over
            the group. A parameter that another module shares with them stays whole there too.

    Raises:
        ValueError: A name in ``replicated`` that no submodule has.
    """

    def __init__(
        self,
        module: nn.Module,
        units: tuple[type[nn.Module], ...] = (),
        compute_dtype: torch.dtype | None = None,
        group: Group = None,
        replicated: Iterable[str] = (),
    ):
        super().__init__()
        self.module = module
        broadcast([*module.parameters(), *module.buffers()], group)
        whole = _parameters_of(module, replicated)
        for parameter in whole:
            _average_gradient(parameter, group)
        self._layouts: dict[nn.Parameter, Layout] = {}
        shards = {
            parameter: self._shard(parameter, compute_dtype, group)
            for parameter in module.parameters()
            if parameter not in whole
        }
        names: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        for owner, unit in _unit_of_module(module, units).items():
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter in shards:
                    owner._parameters[name] = shards[parameter]
                    names.setdefault(unit, []).append((owner, name))
        self._units = [Unit(unit, owned, self._layouts) for unit, owned in names.items()]

    def _shard(
        self, parameter: nn.Parameter, compute_dtype: torch.dtype | None, group: Group
    ) -> nn.Parameter:
        dtype = compute_dtype if parameter.is_floating_point() else None
        layout = Layout(parameter.shape, dist.get_world_size(group), group, dtype)
        shard = nn.Parameter(layout.shard(parameter.detach()), parameter.requires_grad)
        self._layouts[shard] = layout
        return shard

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def full_parameters(self) -> dict[str, Tensor]:
        """Return every parameter whole, in the shards' dtype, by its name in the module; a collective."""
        return {
            name: self._layouts[own]._replace(compute_dtype=None).gather(own)
            if own in self._layouts
            else own.detach()
            for name, own in self.module.named_parameters()
        }


def _parameters_of(root: nn.Module, names: Iterable[str]) -> set[nn.Parameter]:
    """Return the parameters of the submodules with these names."""
    modules = dict(root.named_modules(remove_duplicate=False))
    found: set[nn.Parameter] = set()
    for name in names:
        if name not in modules:
            raise ValueError(
                f"replicated: {name!r} names no submodule; the names are those of named_modules()"
            )
        found.update(modules[name].parameters())
    return found


def _average_gradient(parameter: nn.Parameter, group: Group) -> None:
    """Average a whole parameter's gradient over the group as soon as a backward has accumulated it.

    What earlier backwards left there is equal on all ranks, so its mean is itself.
    """
    if not parameter.requires_grad:
        return

    def average(ready: Tensor) -> None:
        assert ready.grad is not None
        ready.grad = ready.grad.contiguous()
        Average([ready.grad], group).wait()

    parameter.register_post_accumulate_grad_hook(average)


def _unit_of_module(root: nn.Module, types: tuple[type[nn.Module], ...]) -> dict[nn.Module, nn.Module]:
    """Return the unit that gathers each module's own parameters: the outermost of ``types`` or the root."""
    units: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module, unit: nn.Module | None) -> None:
        if unit is None and (isinstance(module, types) if types else module._parameters):
            unit = module
        units.setdefault(module, unit or root)
        for child in module.children():
            visit(child, unit if types else None)

    visit(root, None)
    return units
