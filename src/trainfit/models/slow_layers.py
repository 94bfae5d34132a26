"""State-space and linear-attention layers, which transformers runs slowly without libraries of kernels.

The virtual GPU runs transformers' own code in PyTorch, as a machine without these libraries does.
"""

import re
import sys

from torch import nn

CLASSES = re.compile(
    r"(?:Mixer|MambaLayer|GatedDeltaNet|ShortConv|ShortConvolution|DeltaAttention|LinearAttention|Rglru|"
    r"LightningAttention|RwkvSelfAttention|mLSTMLayer)$"
)
"""Names of such layers' classes in transformers."""
KERNELS = {
    "mamba-ssm": re.compile(r"selective_scan|chunk_scan|mamba_inner_fn"),
    "flash-linear-attention": re.compile(r"gated_delta_rule|_kda$"),
    "causal-conv1d": re.compile(r"^causal_conv1d_fn$"),
}
"""Libraries -> the functions of theirs that transformers' modules name."""


def slow_layers(model: nn.Module) -> tuple[str, ...]:
    """Return a line for each kind of layer whose slow path is traced."""
    kinds = {type(module) for module in model.modules() if CLASSES.search(type(module).__name__)}
    return tuple(_line(kind) for kind in sorted(kinds, key=lambda one: one.__name__))


def _line(kind: type[nn.Module]) -> str:
    names = vars(sys.modules[kind.__module__])
    libraries = [library for library, own in KERNELS.items() if any(map(own.search, names))]
    path = f"{kind.__name__}: transformers' slow path, in plain PyTorch, is assumed"
    if not libraries:
        return f"{path}; it has no other"
    return f"{path}; with {' and '.join(libraries)} installed a step takes less time and memory"
