"""Which of our attention kernels run, forward and backward: told by shapes, strides, dtype, GPU and determinism.

The same answer on a GPU and on the virtual one, so a prediction has the memory of the kernels that will run. The
configurations are the fastest of those measured on an H200 (flash_attention_tune.py; torch 2.11, Triton 3.6): causal, 16
heads, 8K tokens for head size 128, 16K for 64. Other head sizes, fp32, and other GPUs take the plain kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels import flash_attention, flash_attention_tma
from trainfit.kernels.flash_attention_tma import Backward, Groups, GroupsBackward, Tiles, fits

HOPPER = (9, 0)
FORWARD: dict[int, Groups] = {128: Groups(2, 128, 2), 64: Groups(3, 128, 2, take_turns=True)}
"""Head size -> the fastest forward, in Gluon."""
FORWARD_WITHOUT_GLUON: dict[int, Tiles] = {128: Tiles(128, 128, 8, 3), 64: Tiles(128, 64, 4, 3)}
BACKWARD: dict[int, GroupsBackward] = {128: GroupsBackward(2, 4), 64: GroupsBackward(2, 4)}
"""Head size -> the fastest backward, in Gluon. Adds dQ up with atomics, so its last bits differ from run to run."""
REPEATABLE_BACKWARD: dict[int, Backward] = {
    128: Backward(Tiles(64, 128, 8, 2), Tiles(128, 64, 8, 3)),
    64: Backward(Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 3)),
}
"""Two passes, without atomics: equal bit for bit."""


@dataclass(frozen=True)
class Machine:
    """What the choice asks of a GPU and of the Triton beside it."""

    capability: tuple[int, int]
    has_tma: bool = True
    """Triton has tensor descriptors."""
    has_gluon: bool = True


@dataclass(frozen=True)
class Launch:
    """A launcher and how it is to run; None: the plain kernels, which know by themselves."""

    function: Callable[..., Any]
    how: Tiles | Groups | Backward | GroupsBackward | None = None

    def __call__(self, *args: Any, by: Callable[..., Any] = lambda function: function) -> Any:
        """Run it; ``by`` may put another function in the launcher's place."""
        function = by(self.function)
        return function(*args) if self.how is None else function(*args, self.how)


def forward_launch(q: Tensor, k: Tensor, v: Tensor, scale: float, machine: Machine) -> Launch:
    """Who computes the output and log-sum-exp of q [b, h, n, d], k and v [b, k, m, d]."""
    d = q.shape[-1]
    if q.dtype == torch.float64:
        return Launch(flash_attention.tiled_forward)
    if not _for_tma(d, machine) or not fits(q, k, v, scale=scale):
        return Launch(flash_attention.triton_forward)
    if machine.has_gluon:
        return Launch(flash_attention_tma.gluon_forward, FORWARD[d])
    return Launch(flash_attention_tma.forward, FORWARD_WITHOUT_GLUON[d])


def backward_launch(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float, machine: Machine
) -> Launch:
    """Who computes the gradients of q, k and v."""
    d = q.shape[-1]
    if q.dtype == torch.float64:
        return Launch(flash_attention.tiled_backward)
    if not _for_tma(d, machine) or not fits(gradient, q, k, v, out, scale=scale):
        return Launch(flash_attention.triton_backward)
    if machine.has_gluon and not torch.are_deterministic_algorithms_enabled():
        return Launch(flash_attention_tma.backward, BACKWARD[d])
    return Launch(flash_attention_tma.backward, REPEATABLE_BACKWARD[d])


def _for_tma(d: int, machine: Machine) -> bool:
    return machine.capability == HOPPER and machine.has_tma and d in FORWARD


def machine_of(device: torch.device) -> Machine:
    """The real GPU that this device is."""
    return _machine(device.index or 0)


@cache
def _machine(index: int) -> Machine:
    return Machine(
        torch.cuda.get_device_capability(index),
        has_module("triton.tools.tensor_descriptor"),
        has_module("triton.experimental.gluon"),
    )


@cache
def has_module(name: str) -> bool:
    """Whether the module is installed; it is not imported, its packages are."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # one of the packages that it would be in
        return False
