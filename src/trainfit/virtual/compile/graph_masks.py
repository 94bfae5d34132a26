"""Masked pairs in a compiled graph: its fused kernels are no operations, so the graph's nodes are followed in their place."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from trainfit.virtual.trace.masks.tracker import Mark, MaskTracker


class GraphPairs:
    """Follows masks from the inputs of a graph through its nodes to its outputs.

    Args:
        graph: as it was lowered; each node has its fake result in ``meta["val"]``.
        outer: what marks the program's own inputs and outputs.
    """

    def __init__(self, graph: fx.Graph, outer: MaskTracker):
        self._nodes, self._outer = list(graph.nodes), outer
        self._shares: dict[str, Fraction] = {}
        self._outputs: list[Mark | None] = []

    def share(self, node: str | None) -> Fraction | None:
        """Visible share of the pairs that the node works on; None: all, or not known."""
        return self._shares.get(node) if node is not None else None

    def enter(self, inputs: Sequence[Any]) -> None:
        """The program is called with these inputs."""
        self._shares, self._outputs = {}, []
        pairs = MaskTracker(self._found, self._outer.expressions)
        given = iter(inputs)
        for node in self._nodes:
            if node.op == "placeholder":
                mark = self._outer.mark_of(next(given))
                if mark is not None and isinstance(node.meta.get("val"), torch.Tensor):
                    pairs.put(node.meta["val"], mark)
            elif node.op == "output":
                self._outputs = [_passed_on(pairs.mark_of(_value(each))) for each in node.args[0]]
            elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                args, kwargs = tree_map_only(fx.Node, _value, (node.args, node.kwargs))
                share = pairs.share(node.target, args, kwargs)
                if share is not None:
                    self._found(node.name, share)
                pairs.follow(node.target, args, kwargs, _value(node), node.name)

    def leave(self, outputs: Sequence[Any]) -> None:
        """The program returned these outputs."""
        for value, mark in zip(outputs, self._outputs, strict=True):
            if isinstance(value, torch.Tensor) and mark is not None:
                self._outer.put(value, mark)

    def _found(self, product: Any, share: Fraction) -> None:
        if isinstance(product, str):
            self._shares[product] = min(share, self._shares.get(product, Fraction(1)))
        elif product is not None:
            self._outer.found(product, share)


def _passed_on(mark: Mark | None) -> Mark | None:
    """The mark, its products unnamed: they are counted, and only this graph knows them by name."""
    return None if mark is None else mark._replace(products=tuple((None, n) for _, n in mark.products))


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else node
