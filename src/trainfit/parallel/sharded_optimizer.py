"""Sharded optimizer state: each rank keeps the state of its own share of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from trainfit.parallel.collectives import Group, broadcast


class ShardedOptimizer(Optimizer):
    """Wrap any optimizer class so that a rank updates its share of the parameters and broadcasts the result.

    Every rank must hold the same parameters and averaged gradients, as under data parallel. A parameter is
    owned whole by one rank, so optimizers of matrices (Adafactor, Muon) work too. The result equals the
    unsharded optimizer's. A step broadcasts every parameter once.

    Args:
        params: Parameters or parameter groups, as for any optimizer.
        optimizer_class: For example ``torch.optim.AdamW``.
        group: The process group; None: the default group.
        choose_rank: Returns the rank of the group whose share this process updates, from the group and the
            bytes of parameters that each rank updates; None: this process's own.
        kwargs: Arguments of ``optimizer_class``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        group: Group = None,
        choose_rank: Callable[[Group, list[int]], int] | None = None,
        **kwargs: Any,
    ):
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.owner: dict[Tensor, int] = {}
        """Parameter -> the rank of the group that updates it."""
        self._bytes_of_rank = [0] * self.world_size
        self._sharded: Optimizer | None = None
        super().__init__(params, dict(kwargs))
        if choose_rank is not None:
            self.rank = choose_rank(group, self._bytes_of_rank)
        owned = [self._owned(group) for group in self.param_groups]
        self._sharded = optimizer_class(owned, **kwargs)
        self.state = self._sharded.state
        for whole, part in zip(self.param_groups, self._sharded.param_groups, strict=True):
            whole.update({key: value for key, value in part.items() if key != "params"})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters go, largest first, to the rank that owns the fewest bytes."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        for parameter in sorted(added["params"], key=lambda one: -one.nbytes):
            owner = min(range(self.world_size), key=self._bytes_of_rank.__getitem__)
            self.owner[parameter] = owner
            self._bytes_of_rank[owner] += parameter.nbytes
        if self._sharded is not None:
            self._sharded.add_param_group(self._owned(added))
            added.update({k: v for k, v in self._sharded.param_groups[-1].items() if k != "params"})

    def _owned(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [one for one in group["params"] if self.owner[one] == self.rank]}

    @property
    def sharded(self) -> Optimizer:
        """The wrapped optimizer, which holds this rank's parameters and state."""
        assert self._sharded is not None
        return self._sharded

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters, then broadcast every parameter from its owner."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        self._copy_settings()
        self.sharded.step()
        for rank in range(self.world_size):
            broadcast((one for one, owner in self.owner.items() if owner == rank), self.group, rank)
        return loss

    def _copy_settings(self) -> None:
        """Hand the groups' settings on: a scheduler sets them on this optimizer."""
        for whole, part in zip(self.param_groups, self.sharded.param_groups, strict=True):
            part.update({key: value for key, value in whole.items() if key != "params"})

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state on every rank, in the layout and order of the unsharded optimizer.

        A collective: every rank of the group must call it. Tensors of other ranks' states are on the CPU.
        """
        numbers = self._numbers()
        own = {numbers[parameter]: state for parameter, state in self.sharded.state.items()}
        gathered: list[dict[int, Any]] = [{} for _ in range(self.world_size)]
        dist.all_gather_object(gathered, _on_cpu(own), self.group)
        gathered[self.rank] = own
        state = {number: one for part in gathered for number, one in part.items()}
        groups = [
            {**group, "params": [numbers[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, saved at any world size; each rank keeps its share."""
        numbers = self._numbers()
        mine = {number for parameter, number in numbers.items() if self.owner[parameter] == self.rank}
        groups = []
        for whole, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            if len(whole["params"]) != len(saved["params"]):
                raise ValueError(
                    f"a saved group has {len(saved['params'])} parameters, this one {len(whole['params'])}"
                )
            whole.update({key: value for key, value in saved.items() if key != "params"})
            groups.append({**saved, "params": [number for number in saved["params"] if number in mine]})
        state = {number: one for number, one in state_dict["state"].items() if number in mine}
        self.sharded.load_state_dict({"state": state, "param_groups": groups})
        self.state = self.sharded.state

    def _numbers(self) -> dict[Tensor, int]:
        """Parameter -> its number in a state dict: the order of the groups."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return {parameter: number for number, parameter in enumerate(parameters)}


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(one) for key, one in value.items()}
    return value
