"""Choose the attention kernels by shapes, strides, dtype, GPU and determinism.

The choice is the same on a GPU and on the virtual GPU, so predicted memory is that of the kernels that run.
Predictions assume a Triton with Gluon (torch 2.11 and later), and determinism as ``predict --deterministic``
sets it. The Gluon configurations are the fastest on an H200 (benchmarks of torch 2.11, Triton 3.6: causal, 16
heads, 8K tokens for head size 128, 16K for 64). Other head sizes, fp32 and other GPUs take the Triton
kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.custom_op import has_module, interprets_triton
from trainfit.kernels.flash_attention import reference, triton_launch
from trainfit.kernels.flash_attention.hopper import launch as hopper_launch
from trainfit.kernels.flash_attention.hopper.launch import Groups, GroupsBackward, Layout, fits, layout

HOPPER = (9, 0)
FORWARD: dict[int, Groups] = {128: Groups(2, 128, 2), 64: Groups(3, 128, 2)}  # Fastest forward by head size
BACKWARD: dict[int, GroupsBackward] = {128: GroupsBackward(2, 4), 64: GroupsBackward(2, 4)}
"""Fastest backward by head size. It accumulates dQ with atomics, so its last bits vary between runs."""


@dataclass(frozen=True)
class Machine:
    """GPU and Triton, as far as the choice depends on them."""

    capability: tuple[int, int]
    has_gluon: bool = True  # Whether Triton has Gluon and tensor descriptors


@dataclass(frozen=True)
class Launch:
    """A launcher and its configuration; None: the launcher chooses tiles itself."""

    function: Callable[..., Any]
    how: Groups | GroupsBackward | None = None

    @property
    def kernel(self) -> str:
        """``gluon``, ``plain`` or ``tiled``."""
        if self.how is not None:
            return "gluon"
        return "plain" if self.function.__module__ == triton_launch.__name__ else "tiled"

    def __call__(self, *args: Any, by: Callable[..., Any] = lambda function: function) -> Any:
        """Launch the kernels; ``by`` may replace the launcher (by its dry launcher, for example)."""
        function = by(self.function)
        return function(*args) if self.how is None else function(*args, self.how)


def forward_launch(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, machine: Machine
) -> Launch:
    """Return the launch of the forward for q [b, h, n, d], k and v [b, k, m, d]."""
    return _chosen((layout(q), layout(k), layout(v)), scale > 0, machine)


def backward_launch(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool,
    scale: float, machine: Machine,
) -> Launch:  # fmt: skip
    """Return the launch of the backward; deterministic algorithms exclude the Gluon kernel."""
    layouts = (layout(q), layout(gradient), layout(k), layout(v), layout(out))
    deterministic = torch.are_deterministic_algorithms_enabled()
    return _chosen(layouts, scale > 0, machine, backward=True, deterministic=deterministic)


@lru_cache(maxsize=4096)
def _chosen(
    layouts: tuple[Layout, ...],
    has_positive_scale: bool,
    machine: Machine,
    *,
    backward: bool = False,
    deterministic: bool = False,
) -> Launch:
    dtype, d = layouts[0].dtype, layouts[0].shape[-1]
    if dtype == torch.float64:
        return Launch(reference.tiled_backward if backward else reference.tiled_forward)
    has_gluon = machine.capability == HOPPER and machine.has_gluon and d in FORWARD and not deterministic
    if not has_gluon or not fits(layouts, has_positive_scale):
        return Launch(triton_launch.triton_backward if backward else triton_launch.triton_forward)
    if backward:
        return Launch(hopper_launch.backward, BACKWARD[d])
    return Launch(hopper_launch.gluon_forward, FORWARD[d])


@cache
def machine_of(device: torch.device) -> Machine | None:
    """Describe a real GPU, or Triton's interpreter, which has no Gluon; None: no kernel runs there."""
    if interprets_triton():
        return Machine((0, 0), has_gluon=False)
    if device.type != "cuda" or not has_module("triton"):
        return None
    return Machine(
        torch.cuda.get_device_capability(device),
        torch.version.hip is None  # AMD's MI250 also reports (9, 0)
        and has_module("triton.tools.tensor_descriptor")
        and has_module("triton.experimental.gluon"),
    )
