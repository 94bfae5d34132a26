"""Choose the attention kernels by shapes, strides, dtype, GPU and determinism.

The choice is the same on a GPU and on the virtual GPU, so predicted memory is that of the kernels that run.
Predictions assume a Triton with Gluon (torch 2.11 and later), and determinism as ``predict --deterministic``
sets it. The Gluon configurations are the fastest of those measured with torch 2.11 and Triton 3.6, causal:
with four query heads for each key head on an H100 (1K, 2K, 8K and 16K tokens, 32K in all), ungrouped on an
H200 (16 heads, 8K and 16K). Heads of 256 have a Gluon forward and cuDNN's backward; other head sizes, fp32
and other GPUs take the Triton kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.custom_op import has_module, interprets_triton
from trainfit.kernels.flash_attention import cudnn_launch, reference, triton_launch
from trainfit.kernels.flash_attention.cudnn_launch import supports_cudnn
from trainfit.kernels.flash_attention.hopper import launch as hopper_launch
from trainfit.kernels.flash_attention.hopper.launch import (
    Groups,
    GroupsBackward,
    Layout,
    fits,
    layout,
)
from trainfit.kernels.flash_attention.triton_launch import Passes, Tiles, block_d

HOPPER = (9, 0)
SHORT = 4096
"""Queries below which a sequence is short; measured are 2K and 8K."""
FORWARD: dict[int, Groups] = {
    256: Groups(2, 64, 2, 4),
    128: Groups(2, 128, 2, 16, persistent=True),
    64: Groups(3, 128, 2),
}
"""Fastest forward by head size."""
SHORT_FORWARD: dict[int, Groups] = {
    256: Groups(2, 64, 2),
    128: FORWARD[128],
    64: Groups(2, 128, 3, persistent=True),  # A tile of 192 rows computes a third more of 1,024 than 128
}
BACKWARD: dict[int, GroupsBackward] = {128: GroupsBackward(2, 2), 64: GroupsBackward(2, 2)}
"""Fastest backward by head size. It accumulates dQ with atomics, so its last bits vary between runs."""
SHORT_BACKWARD: dict[int, GroupsBackward] = {128: GroupsBackward(2, 8), 64: GroupsBackward(2, 8)}
IN_PASSES = {
    256: Passes(Tiles(64, 128, 8, 2), Tiles(32, 128, 8, 3), Tiles(64, 64, 4, 2)),
    512: Passes(Tiles(32, 64, 8, 2), Tiles(32, 64, 8, 1), Tiles(64, 32, 8, 1)),
}
"""Fastest tiles of a backward in passes by the columns of a tile; narrower heads are faster by triton.py."""
CUDNN_BACKWARD = (256,)
"""Head sizes whose backward is cuDNN's where it can be: 8 to 19 % faster than in passes."""
UNGROUPED_FORWARD, UNGROUPED_BACKWARD = 8, 4
"""Heads at once where each query head has its own keys, which take more of the L2 cache."""


@dataclass(frozen=True)
class Machine:
    """GPU and Triton, as far as the choice depends on them."""

    capability: tuple[int, int]
    has_gluon: bool = True  # Whether Triton has Gluon and tensor descriptors
    has_cudnn: bool = True


@dataclass(frozen=True)
class Launch:
    """A launcher and its configuration; None: the launcher chooses tiles itself."""

    function: Callable[..., Any]
    how: Groups | GroupsBackward | Passes | None = None

    @property
    def kernel(self) -> str:
        """``gluon``, ``passes``, ``cudnn``, ``plain`` or ``tiled``."""
        if isinstance(self.how, Passes):
            return "passes"
        if self.how is not None:
            return "gluon"
        modules = {triton_launch.__name__: "plain", cudnn_launch.__name__: "cudnn"}
        return modules.get(self.function.__module__, "tiled")

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
    """Return the launch of the backward; deterministic algorithms exclude Gluon's and cuDNN's kernels."""
    layouts = (layout(q), layout(gradient), layout(k), layout(v), layout(out))
    deterministic = torch.are_deterministic_algorithms_enabled()
    by_cudnn = supports_cudnn(q, k, is_causal)
    return _chosen(layouts, scale > 0, machine, backward=True, deterministic=deterministic, by_cudnn=by_cudnn)


@lru_cache(maxsize=4096)
def _chosen(
    layouts: tuple[Layout, ...],
    has_positive_scale: bool,
    machine: Machine,
    *,
    backward: bool = False,
    deterministic: bool = False,
    by_cudnn: bool = False,
) -> Launch:
    dtype, d = layouts[0].dtype, layouts[0].shape[-1]
    if dtype == torch.float64:
        return Launch(reference.tiled_backward if backward else reference.tiled_forward)
    has_tma = machine.capability == HOPPER and machine.has_gluon and fits(layouts, has_positive_scale)
    if has_tma and not backward and d in FORWARD:
        return Launch(hopper_launch.gluon_forward, forward_groups(*_sizes(layouts)))
    if has_tma and backward and d in BACKWARD and not deterministic:
        return Launch(hopper_launch.backward, backward_groups(*_sizes(layouts)))
    if has_tma and backward and d in CUDNN_BACKWARD and by_cudnn and machine.has_cudnn:
        return Launch(cudnn_launch.cudnn_backward)
    if has_tma and backward and block_d(d) in IN_PASSES:
        return Launch(triton_launch.backward_in_passes, IN_PASSES[block_d(d)])
    return Launch(triton_launch.triton_backward if backward else triton_launch.triton_forward)


def _sizes(layouts: tuple[Layout, ...]) -> tuple[int, int, int]:
    """Return head size, queries, and query heads for each key head; q's layout is the first."""
    (_, heads, n, d), key_heads = layouts[0].shape, min(each.shape[1] for each in layouts)
    return d, n, heads // key_heads


def forward_groups(d: int, n: int, group: int) -> Groups:
    """Return the fastest forward.

    Args:
        n: Queries.
        group: Query heads for each key head.
    """
    how = (SHORT_FORWARD if n < SHORT else FORWARD)[d]
    return how if group > 1 else replace(how, heads_at_once=UNGROUPED_FORWARD)


def backward_groups(d: int, n: int, group: int) -> GroupsBackward:
    """Return the fastest backward; arguments as of ``forward_groups``."""
    how = (SHORT_BACKWARD if n < SHORT else BACKWARD)[d]
    return how if group > 1 else replace(how, heads_at_once=UNGROUPED_BACKWARD)


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
        torch.backends.cudnn.is_available(),
    )
