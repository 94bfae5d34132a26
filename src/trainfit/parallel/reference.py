"""The reference of a policy: the model that its divergence is measured from, without a second model.

Only what trains can differ from the start. So the reference is the model without its adapter, or the model
whose trained parameters are exchanged with a copy of their first values while it is scored. Shards are copied
as shards. Memory: none, or the trained parameters once more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Reference(ABC):
    """A context in which the model computes as the reference.

    Attributes:
        tensors: what a checkpoint keeps of it, by the parameters' names.
    """

    tensors: dict[str, Tensor]

    @abstractmethod
    def begin(self, model: nn.Module) -> None:
        """Take the model as it is at the start."""

    @abstractmethod
    def active(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return the context; weights that FSDP2 shards are shards when it is entered and left."""


class AdapterOff(Reference):
    """The model without its adapter."""

    def __init__(self) -> None:
        self.tensors = {}

    def begin(self, model: nn.Module) -> None:
        """Keep nothing: the base does not train."""

    def active(self, model: Any) -> AbstractContextManager[object]:
        """Switch the adapter off meanwhile."""
        return model.disable_adapter()


class Copy(Reference):
    """The model with the first values of the parameters that train."""

    def __init__(self) -> None:
        self.tensors = {}

    def begin(self, model: nn.Module) -> None:
        """Copy the parameters that train."""
        self.tensors = {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[None]:
        """Exchange the parameters and their first values meanwhile."""
        self._exchange(model)
        try:
            yield
        finally:
            self._exchange(model)

    @torch.no_grad()
    def _exchange(self, model: nn.Module) -> None:
        """Exchange values, not tensors: FSDP2, optimizers and recorded graphs refer to the parameters."""
        parameters = dict(model.named_parameters())
        for name, held in self.tensors.items():
            now = parameters[name].detach()
            kept = now.clone()
            now.copy_(held)
            held.copy_(kept)
