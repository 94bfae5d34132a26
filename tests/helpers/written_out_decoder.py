"""The course program of the published 2.7B measurements, in our own words: every operation written out by
hand.

Separate matrices without biases, RMSNorm, RoPE on neighbouring pairs, softmax and SiLU operation by
operation, a causal mask made by every layer. Shapes: b batch, s sequence, d width, h heads, f feed-forward, v
vocabulary.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

EPSILON = 1e-5
THETA = 10_000.0


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, device=torch.device("cpu")))


class Matrix(nn.Module):
    def __init__(self, wide: int, high: int):
        super().__init__()
        self.weight = weight(high, wide)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Norm(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.weight = weight(d)

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)
        return self.weight * normed


def softmax(x: Tensor) -> Tensor:
    exponential = torch.exp(x - torch.max(x, dim=-1, keepdim=True)[0])
    return exponential / torch.sum(exponential, dim=-1, keepdim=True)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Rotation(nn.Module):
    def __init__(self, context: int, head: int):
        super().__init__()
        device = torch.device("cpu")
        frequencies = THETA ** -(torch.arange(0, head, 2, device=device) / head)
        angles = torch.arange(context, device=device)[:, None] * frequencies
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin())))

    def forward(self, x_bhsd: Tensor, places: Tensor) -> Tensor:
        turns: Any = self.turns
        cos, sin = turns[:, places, :]
        first, second = x_bhsd.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((cos * first - sin * second, sin * first + cos * second), dim=-1)
        return turned.flatten(-2).contiguous()


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, rotation: Rotation):
        super().__init__()
        self.q, self.k, self.v, self.out = (Matrix(d, d) for _ in range(4))
        self.heads, self.rotation = heads, rotation

    def forward(self, x_bsd: Tensor) -> Tensor:
        s, d = x_bsd.shape[1:]
        q, k, v = (
            part(x_bsd).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        places = torch.arange(s, device=x_bsd.device)
        q, k = self.rotation(q, places), self.rotation(k, places)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(d // self.heads)
        scores = torch.where(places[:, None] >= places[None, :], scores, float("-inf"))
        mixed = torch.einsum("bhqk,bhkd->bhqd", softmax(scores), v)
        return self.out(mixed.transpose(1, 2).flatten(-2).contiguous())


class Block(nn.Module):
    def __init__(self, d: int, heads: int, f: int, rotation: Rotation):
        super().__init__()
        self.attention = Attention(d, heads, rotation)
        self.gate, self.up, self.down = Matrix(d, f), Matrix(d, f), Matrix(f, d)
        self.before_attention, self.before_mlp = Norm(d), Norm(d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        y = self.before_mlp(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class WrittenOut(nn.Module):
    """Token ids [b, s] -> logits [b, s, v]."""

    def __init__(self, *, v: int, context: int, d: int, layers: int, heads: int, f: int):
        super().__init__()
        self.embedding = weight(v, d)
        rotation = Rotation(context, d // heads)
        self.layers = nn.ModuleList(Block(d, heads, f, rotation) for _ in range(layers))
        self.norm, self.head = Norm(d), Matrix(d, v)

    def forward(self, ids_bs: Tensor) -> Tensor:
        x = self.embedding[ids_bs, :]
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))
