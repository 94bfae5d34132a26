"""Which of our attention kernels run, forward and backward: told by shapes, strides, dtype, GPU and determinism.

The same answer on a GPU and on the virtual one, so a prediction has the memory of the kernels that will run, if two things are
as it takes them: Triton has Gluon (torch 2.11's has; without it the plain kernels run, whose backward needs less memory), and
determinism is asked for or not (``predict --deterministic`` is what ``train`` runs by default). The configurations are the fastest of those measured on an H200 (benchmarks/kernels/attention_tune.py; torch 2.11, Triton 3.6): causal, 16
heads, 8K tokens for head size 128, 16K for 64. Other head sizes, fp32, and other GPUs take the plain kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.custom_op import has_module
from trainfit.kernels.flash_attention import reference as flash_attention_tiled
from trainfit.kernels.flash_attention import triton_launch as flash_attention_launch
from trainfit.kernels.flash_attention.hopper import launch as flash_attention_tma
from trainfit.kernels.flash_attention.hopper.launch import Groups, GroupsBackward, Layout, fits, layout

HOPPER = (9, 0)
FORWARD: dict[int, Groups] = {
    128: Groups(2, 128, 2),
    64: Groups(3, 128, 2),
}
"""Head size -> the fastest forward."""
BACKWARD: dict[int, GroupsBackward] = {128: GroupsBackward(2, 4), 64: GroupsBackward(2, 4)}
"""Head size -> the fastest backward. Adds dQ up with atomics, so its last bits differ from run to run."""


@dataclass(frozen=True)
class Machine:
    """What the choice asks of a GPU and of the Triton beside it."""

    capability: tuple[int, int]
    has_gluon: bool = True
    """Triton has Gluon and tensor descriptors."""


@dataclass(frozen=True)
class Launch:
    """A launcher and how it is to run; None: the plain kernels, which know by themselves."""

    function: Callable[..., Any]
    how: Groups | GroupsBackward | None = None

    @property
    def kernel(self) -> str:
        """``gluon``, ``plain`` or ``tiled``."""
        if self.how is not None:
            return "gluon"
        return "plain" if self.function.__module__ == flash_attention_launch.__name__ else "tiled"

    def __call__(self, *args: Any, by: Callable[..., Any] = lambda function: function) -> Any:
        """Run it; ``by`` may put another function in the launcher's place."""
        function = by(self.function)
        return function(*args) if self.how is None else function(*args, self.how)


def forward_launch(q: Tensor, k: Tensor, v: Tensor, scale: float, machine: Machine) -> Launch:
    """Who computes the output and log-sum-exp of q [b, h, n, d], k and v [b, k, m, d]."""
    return _forward((layout(q), layout(k), layout(v)), scale > 0, machine)


def backward_launch(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float, machine: Machine
) -> Launch:
    """Who computes the gradients of q, k and v; where determinism is asked for, kernels whose results are equal bit for bit."""
    layouts = (layout(q), layout(gradient), layout(k), layout(v), layout(out))
    return _backward(layouts, scale > 0, machine, torch.are_deterministic_algorithms_enabled())


@lru_cache(maxsize=4096)
def _forward(layouts: tuple[Layout, ...], has_positive_scale: bool, machine: Machine) -> Launch:
    """``layouts``: q's first."""
    if layouts[0].dtype == torch.float64:
        return Launch(flash_attention_tiled.tiled_forward)
    if _has_gluon(layouts[0], machine) and fits(layouts, has_positive_scale):
        return Launch(flash_attention_tma.gluon_forward, FORWARD[layouts[0].shape[-1]])
    return Launch(flash_attention_launch.triton_forward)


@lru_cache(maxsize=4096)
def _backward(
    layouts: tuple[Layout, ...], has_positive_scale: bool, machine: Machine, repeatable: bool
) -> Launch:
    """``layouts``: q's first."""
    if layouts[0].dtype == torch.float64:
        return Launch(flash_attention_tiled.tiled_backward)
    if _has_gluon(layouts[0], machine) and not repeatable and fits(layouts, has_positive_scale):
        return Launch(flash_attention_tma.backward, BACKWARD[layouts[0].shape[-1]])
    return Launch(flash_attention_launch.triton_backward)


def _has_gluon(q: Layout, machine: Machine) -> bool:
    """Kernels in Gluon are measured for this GPU and head size."""
    return machine.capability == HOPPER and machine.has_gluon and q.shape[-1] in FORWARD


def machine_of(device: torch.device) -> Machine:
    """The real GPU that this device is."""
    return _machine(device.index or 0)


@cache
def _machine(index: int) -> Machine:
    return Machine(
        torch.cuda.get_device_capability(index),
        torch.version.hip is None  # AMD's MI250 says (9, 0) too
        and has_module("triton.tools.tensor_descriptor")
        and has_module("triton.experimental.gluon"),
    )
