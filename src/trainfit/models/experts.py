"""Find the routed experts of a built model, and the share of them that one token meets."""

from typing import Any

from torch import nn


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


def _number(value: Any) -> int:
    return value if type(value) is int else 0
