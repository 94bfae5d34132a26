"""Recurrent layers as CUDA runs them: ``aten::_cudnn_rnn`` for all positions, layers and directions.

The CPU runs one operation for each gate and position. Packed sequences keep those.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from trainfit.virtual.cuda.flops import OpFlops, flop_rule, plain

aten = torch.ops.aten
RELU, TANH, LSTM, GRU = range(4)
"""cuDNN's modes."""
GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}
SAVED = {RELU: 1, TANH: 1, LSTM: 5, GRU: 4}
"""Values of a position and hidden unit that the backward needs at least: gates, and an LSTM's cell or the
factor of a GRU's reset gate."""


def kernels() -> dict[str, Callable[..., Any]]:
    """Return the kernels that replace the composite operations of aten, by their names."""
    return {
        "lstm.input": _lstm,
        "gru.input": partial(_without_cell, GRU),
        "rnn_tanh.input": partial(_without_cell, TANH),
        "rnn_relu.input": partial(_without_cell, RELU),
    }


def _lstm(x: Tensor, states: Any, params: Any, *options: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _run(LSTM, x, states[0], states[1], params, *options, **named)[:3]


def _without_cell(
    mode: int, x: Tensor, hx: Tensor, params: Any, *options: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    return _run(mode, x, hx, None, params, *options, **named)[:2]


def _run(
    mode: int,
    x: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    hidden = params[1].shape[0] // GATES[mode]
    projected = hx.shape[-1] if hx.shape[-1] != hidden else 0
    per_layer = 2 + 2 * has_biases + bool(projected)
    return aten._cudnn_rnn.default(
        x, list(params), per_layer, None, hx, cx, mode, hidden, projected, num_layers, batch_first, dropout,
        train, bidirectional, [], None,
    )  # fmt: skip


def forward(x: Tensor, weight: list[Tensor], _: int, weight_buf: Any, hx: Tensor, cx: Any, *rest: Any) -> Any:
    """Return the fake result: output, last states, the reserve saved for the backward, the weights' buffer.

    cuDNN does not publish how much it saves; the minimum that the backward needs is assumed.
    """
    mode, hidden, projected, num_layers, batch_first, _, train, bidirectional = rest[:8]
    length, batch = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    width, layers = projected or hidden, num_layers * (1 + bidirectional)
    output = x.new_empty(length, batch, width * (1 + bidirectional))
    values = layers * hidden * SAVED[mode] + (num_layers - 1) * output.shape[-1]
    saved_bytes = length * batch * values * x.element_size() if train else 0
    return (
        output.transpose(0, 1) if batch_first else output,
        hx.new_empty(layers, batch, width),
        cx.new_empty(layers, batch, hidden) if cx is not None else x.new_empty(0),
        x.new_empty(saved_bytes, dtype=torch.uint8),
        weight_buf if weight_buf is not None else x.new_empty(0),
    )


def backward(
    x: Tensor, weight: list[Tensor], _: int, weight_buf: Tensor, hx: Tensor, cx: Any, *rest: Any
) -> Any:
    """Return the fake gradients of input, states and weights."""
    return (
        torch.empty_like(x),
        torch.empty_like(hx),
        torch.empty_like(cx) if cx is not None else x.new_empty(0),
        [torch.empty_like(one) for one in weight] if rest[-1][3] else [],
    )


def product_shape(args: tuple[Any, ...], mode_at: int) -> tuple[int, int, int, int]:
    """Return the product of each position, layer and direction: their number, batch, gates x units, units."""
    x, hx = args[0], args[4]
    mode, hidden = args[mode_at : mode_at + 2]
    layers, batch = hx.shape[:2]
    return layers * (prod(x.shape[:-1]) // batch), batch, GATES[mode] * hidden, hidden


FAKES: dict[Any, Callable[..., Any]] = {
    aten._cudnn_rnn.default: forward,
    aten._cudnn_rnn_backward.default: backward,
}


@flop_rule("aten::_cudnn_rnn")
def flops(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """Count each position times every matrix: the input's, that of the state before, a projection's."""
    return plain(_products(args))


@flop_rule("aten::_cudnn_rnn_backward")
def flops_of_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """Count the forward's FLOPs for the gradients of inputs and states, and again for the weights'."""
    return plain(_products(args) * (1 + bool(args[-1][3])))


def _products(args: tuple[Any, ...]) -> int:
    x, weights = args[:2]
    return 2 * prod(x.shape[:-1]) * sum(one.numel() for one in weights if one.ndim == 2)
