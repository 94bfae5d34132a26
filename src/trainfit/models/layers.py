"""Find parts of a built model by structure: repeated decoder blocks, positions, experts, slow layers.

transformers models (also wrapped by PEFT) and the native decoder keep their blocks in a ``nn.ModuleList`` of
one class, or of few in hybrids that alternate attention with state-space blocks.

State-space and linear-attention layers are slow in transformers without libraries of kernels. The virtual GPU
runs transformers' own code in PyTorch, as a machine without these libraries does.
"""

import re
import sys
from typing import Any

from torch import nn

from trainfit.spec.errors import InputError

POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "pos_emb")
"""Names of position embeddings in transformers' models."""

SLOW_CLASSES = re.compile(
    r"(?:Mixer|MambaLayer|GatedDeltaNet|ShortConv|ShortConvolution|DeltaAttention|LinearAttention|Rglru|"
    r"LightningAttention|RwkvSelfAttention|mLSTMLayer)$"
)
"""Names of state-space and linear-attention layers' classes in transformers."""
SLOW_WITHOUT = {
    "mamba-ssm": re.compile(r"selective_scan|chunk_scan|mamba_inner_fn"),
    "flash-linear-attention": re.compile(r"gated_delta_rule|_kda$"),
    "causal-conv1d": re.compile(r"^causal_conv1d_fn$"),
}
"""Libraries -> the functions of theirs that transformers' modules name."""
ORIGINAL = "trainfit_original"
"""Attribute of a class that a technique derived from a block's: the original class."""


def max_positions(model: nn.Module) -> int | None:
    """Return the rows of the learned position embedding; None without one (rotary, ALiBi)."""
    tables = [
        module.num_embeddings - getattr(module, "offset", 0)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in POSITION_TABLES
    ]
    return min(tables, default=None)


def layer_lists(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Return dotted names and ModuleLists of the repeated decoder blocks, in ``named_modules`` order.

    A list counts if it has at most half as many classes as children and is not inside another such list
    (experts are not decoder blocks). Of several, those with at least half as many parameters as the largest
    are kept: both stacks of a decoder, but not a small list of prediction heads.
    """
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(outer + ".") for outer, _ in found)
        if not inside and isinstance(module, nn.ModuleList) and _is_repeated(module):
            found.append((name, module))
    if len(found) == 1 and any(parameter.numel() for parameter in found[0][1].parameters()):
        return found  # Nothing to compare.
    largest = max((num_weights(blocks) for _, blocks in found), default=0)
    return [(name, blocks) for name, blocks in found if largest and 2 * num_weights(blocks) >= largest]


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's repeated blocks, first to last."""
    return [block for _, found in layer_lists(model) for block in found]


def require_blocks(model: nn.Module, field: str, value: Any, remedy: str) -> list[nn.Module]:
    """Return the model's repeated blocks, first to last.

    Raises:
        InputError: There are none, and ``field: value`` of the recipe needs them.
    """
    blocks = decoder_blocks(model)
    if not blocks:
        raise InputError("no repeated blocks were found in this model", remedy, field=field, value=value)
    return blocks


def num_quantized(module: nn.Module) -> int:
    """Return the number of weights that are stored as codes, which are not parameters."""
    return sum(getattr(part, "num_quantized", 0) for part in module.modules())


def num_weights(module: nn.Module) -> int:
    """Return the number of weights, of which some may be stored as codes.

    Codes are buffers, or parameters where FSDP2 shards them.
    """
    codes = code_parameters(module)
    return sum(one.numel() for one in module.parameters() if one not in codes) + num_quantized(module)


def code_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that hold the codes of quantised weights, which are counted by their layer."""
    return {one for part in module.modules() for one in getattr(part, "code_parameters", ())}


def code_names(module: nn.Module) -> set[str]:
    """Return the names of the codes that FSDP2 shards as parameters, and that are buffers otherwise."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        for name in getattr(part, "sharded_names", ())
    }


def active_shares(model: nn.Module) -> dict[nn.Module, float]:
    """Return the modules of routed experts, and the share of each one's parameters that one token meets.

    transformers keeps a layer's experts in one module, whose router, or the block around both, has ``top_k``.
    """
    found: dict[nn.Module, float] = {}
    for block in model.modules():
        for name, experts in block.named_children():
            num_experts = getattr(experts, "num_experts", None)
            if not name.endswith("experts") or type(num_experts) is not int:
                continue
            for router in (*block.children(), block):
                chosen = getattr(router, "top_k", None)
                # A rank of expert parallel holds some of the experts; the router chooses of all.
                of_all = max(num_experts, _number(getattr(router, "num_experts", None)))
                if router is not experts and type(chosen) is int and 0 < chosen <= of_all:
                    found[experts] = chosen / of_all
                    break
    return found


def slow_layers(model: nn.Module) -> tuple[str, ...]:
    """Return a line for each kind of state-space or linear-attention layer whose slow path is traced."""
    kinds = {type(module) for module in model.modules() if SLOW_CLASSES.search(type(module).__name__)}
    return tuple(_slow_line(kind) for kind in sorted(kinds, key=lambda one: one.__name__))


def _is_repeated(blocks: nn.ModuleList) -> bool:
    classes = {getattr(block, ORIGINAL, type(block)) for block in blocks}
    return len(blocks) > 0 and len(classes) <= max(1, len(blocks) // 2)


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def _slow_line(kind: type[nn.Module]) -> str:
    names = vars(sys.modules[kind.__module__])
    libraries = [library for library, own in SLOW_WITHOUT.items() if any(map(own.search, names))]
    path = f"{kind.__name__}: transformers' slow path, in plain PyTorch, is assumed"
    if not libraries:
        return f"{path}; it has no other"
    return f"{path}; with {' and '.join(libraries)} installed a step takes less time and memory"
