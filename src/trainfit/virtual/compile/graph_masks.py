"""Masks in a compiled graph, propagated through its nodes, because fused kernels are no operations."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from trainfit.virtual.trace.masks.tracker import Mark, MaskTracker


class GraphMasks:
    """Propagates masks from a lowered graph's inputs to its outputs, of the program that ``outer`` traces."""

    def __init__(self, graph: fx.Graph, outer: MaskTracker):
        self._nodes, self._outer = list(graph.nodes), outer
        self._is_dynamic = any(isinstance(node.meta.get("val"), torch.SymInt) for node in self._nodes)
        self._shares: dict[str, Fraction] = {}
        self._outputs: list[Mark | None] = []

    def visible_share(self, node: str | None) -> Fraction | None:
        """Return the visible share of the pairs of a node; None: all, or unknown."""
        return self._shares.get(node) if node is not None else None

    def enter(self, inputs: Sequence[Any]) -> None:
        """Propagate the masks of a call's inputs."""
        self._shares, self._outputs = {}, []
        if self._is_dynamic:
            return  # A mask is an expression of known sizes.
        tracker = MaskTracker(self._on_share, self._outer.expressions)
        remaining = iter(inputs)
        for node in self._nodes:
            if node.op == "placeholder":
                mark = self._outer.mark_of(next(remaining))
                if mark is not None and isinstance(node.meta.get("val"), torch.Tensor):
                    tracker.put(node.meta["val"], mark)
            elif node.op == "output":
                self._outputs = [_anonymous(tracker.mark_of(_value(each))) for each in node.args[0]]
            elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                args, kwargs = tree_map_only(fx.Node, _value, (node.args, node.kwargs))
                share = tracker.visible_share(node.target, args, kwargs)
                if share is not None:
                    self._on_share(node.name, share)
                tracker.propagate(node.target, args, kwargs, _value(node), node.name)

    def leave(self, outputs: Sequence[Any]) -> None:
        """Mark the outputs of the call."""
        if self._is_dynamic:
            return
        for value, mark in zip(outputs, self._outputs, strict=True):
            if isinstance(value, torch.Tensor) and mark is not None:
                self._outer.put(value, mark)

    def _on_share(self, product: Any, share: Fraction) -> None:
        if isinstance(product, str):
            self._shares[product] = min(share, self._shares.get(product, Fraction(1)))
        elif product is not None:
            self._outer.on_share(product, share)


def _anonymous(mark: Mark | None) -> Mark | None:
    """Remove the products' names, which are known in this graph alone; they are counted already."""
    return None if mark is None else mark._replace(products=tuple((None, n) for _, n in mark.products))


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else node
