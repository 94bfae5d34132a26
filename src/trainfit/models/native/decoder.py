"""The native decoder: identical blocks with fused qkv and gate-up projections.

Shapes: b batch, s sequence, e hidden_size, h heads, k key-value heads, d head_dim, f intermediate_size, v
vocabulary. Memory: docs/internals/native-decoder.md.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfit.models.deferred_init import is_deferred
from trainfit.models.few_blocks import META, block_or_outline, without_outlines
from trainfit.models.native import attention, positions
from trainfit.models.native.config import NativeConfig
from trainfit.spec.errors import InputError

IGNORED_LABEL = -100


class Output(NamedTuple):
    """Loss (fp32 scalar, None without labels) and logits [b, s, v]."""

    loss: Tensor | None
    logits: Tensor


class PositionTensors(NamedTuple):
    """Tensors that all blocks share: RoPE's ``cos`` and ``sin`` [s, 1, r/2], ``bias`` [1, h or 1, s, s].

    With packed documents they are [b, s, 1, r/2] and [b, h or 1, s, s].

    With ``slopes`` [h] instead of ``bias``, each block computes its own bias.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None


class Uninitialised:
    """Mixin that leaves a layer's weights as allocated; ``init_weights`` initialises them."""

    def reset_parameters(self) -> None:
        """Do nothing."""


class Linear(Uninitialised, nn.Linear):
    """Linear layer without initialisation."""


class Embedding(Uninitialised, nn.Embedding):
    """Embedding without initialisation."""


class UnfusedRMSNorm(nn.RMSNorm):
    """RMSNorm (arXiv:1910.07467) by separate fp32 operations, as before PyTorch fused it."""

    def forward(self, x: Tensor) -> Tensor:
        x_fp32 = x.float()
        scale = torch.rsqrt(x_fp32.pow(2).mean(dim=-1, keepdim=True) + (self.eps or 0.0))
        return (x_fp32 * scale * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query causal self-attention: query head i reads key-value head i * k // h.

    ``kind`` is the recipe's ``attention``.
    """

    attend: Callable[..., Tensor] = staticmethod(attention.attend)
    """The kernels of ``triton``; one of several ranks of a sequence sets others, which gather keys."""
    eager: Callable[..., Tensor] = staticmethod(attention.eager_attention)
    """The operations of ``eager``; a profile sets others, which are in ranges."""

    def __init__(self, config: NativeConfig, *, kind: str, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.config, self.kind = config, kind
        heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.heads = [heads, groups, groups]
        self.qkv = Linear(config.hidden_size, sum(self.heads) * d, config.attention_bias, device, dtype)
        self.out = Linear(heads * d, config.hidden_size, config.attention_output_bias, device, dtype)
        self.q_norm = norm(config, d, dtype, device) if config.qk_norm else None
        self.k_norm = norm(config, d, dtype, device) if config.qk_norm else None
        self.prefix: nn.Parameter | None = None
        """Keys and values of a prefix, [2, tokens, k, d] (virtual_tokens.py)."""

    def forward(self, x_bse: Tensor, shared: PositionTensors) -> Tensor:
        return self.of_heads(*self.projected(x_bse, shared), shared)

    def of_heads(self, q: Tensor, k: Tensor, v: Tensor, shared: PositionTensors) -> Tensor:
        """Return the output [b, s, e] from queries [b, s, h, d], keys and values [b, s, k, d]."""
        b, s, *_ = q.shape
        if self.prefix is not None:
            prefix_k, prefix_v = self.prefix.to(k.dtype).unsqueeze(1).expand(-1, b, -1, -1, -1)
            k, v = torch.cat((prefix_k, k), dim=1), torch.cat((prefix_v, v), dim=1)
        bias = shared.bias
        if shared.slopes is not None:
            bias = positions.additive_bias(self.config, s, shared.slopes, q.dtype, q.device)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        attended = self.attended(q, k, v, bias)
        return self.out(attended.transpose(1, 2).reshape(b, s, -1))

    def projected(self, x_bse: Tensor, shared: PositionTensors) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [b, s, h, d], keys and values [b, s, k, d] at their positions, without a prefix."""
        return self.split(self.qkv(x_bse), shared)

    def split(self, qkv: Tensor, shared: PositionTensors) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values at their positions from their product."""
        b, s, _ = qkv.shape
        q, k, v = qkv.view(b, s, -1, self.config.head_dim).split(self.heads, dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if shared.cos is not None and shared.sin is not None:
            q, k = self.rotated(q, k, shared.cos, shared.sin)
            # As a saved view, v would keep the unrotated q and k alive until the backward.
            v = v.contiguous() if self.prefix is None else v
        return q, k, v

    def attended(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """Return attention of [b, h, s, d] queries over [b, k, s, d] keys and values by this layer's kind."""
        if self.kind == "eager":
            return self.eager(q, k, v, bias, attention.SOFTMAX[self.config.softmax])
        if self.kind == "triton":
            return attention.own_attention(q, k, v, bias, self.attend)
        return attention.sdpa(q, k, v, bias)

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [b, s, h, d] and keys, rotated by their positions."""
        return positions.rotate(q, cos, sin), positions.rotate(k, cos, sin)


class FeedForward(nn.Module):
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` without a gate."""

    def __init__(self, config: NativeConfig, *, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.hidden_act, self.gated = config.hidden_act, config.gated_mlp
        e, f = config.hidden_size, config.intermediate_size
        self.up = Linear(e, 2 * f if self.gated else f, config.mlp_bias, device, dtype)
        self.down = Linear(f, e, config.mlp_bias, device, dtype)

    def forward(self, x_bse: Tensor) -> Tensor:
        up = self.up(x_bse)
        if not self.gated:
            return self.down(self.act(up))
        gate, up = up.chunk(2, dim=-1)
        if self.hidden_act == "relu":
            # ReLU saves its output; as a view, up would keep gate alive until the backward.
            up = up.contiguous()
        return self.down(self.act(gate) * up)

    def act(self, x: Tensor) -> Tensor:
        if self.hidden_act == "silu":
            return F.silu(x)
        if self.hidden_act == "silu_unfused":
            return x * torch.sigmoid(x)
        if self.hidden_act == "relu":
            return F.relu(x)
        return F.gelu(x, approximate="tanh" if self.hidden_act == "gelu_tanh" else "none")


class Block(nn.Module):
    """Decoder block: pre-norm ``x + part(norm(x))`` or post-norm ``norm(x + part(x))``."""

    def __init__(self, config: NativeConfig, *, kind: str, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.post = config.norm_placement == "post"
        self.attention_norm = norm(config, config.hidden_size, dtype, device)
        self.attention = Attention(config, kind=kind, dtype=dtype, device=device)
        self.mlp_norm = norm(config, config.hidden_size, dtype, device)
        self.mlp = FeedForward(config, dtype=dtype, device=device)

    def forward(self, x_bse: Tensor, shared: PositionTensors) -> Tensor:
        if self.post:
            x_bse = self.attention_norm(x_bse + self.attention(x_bse, shared))
            return self.mlp_norm(x_bse + self.mlp(x_bse))
        x_bse = x_bse + self.attention(self.attention_norm(x_bse), shared)
        return x_bse + self.mlp(self.mlp_norm(x_bse))


class NativeDecoder(nn.Module):
    """A causal language model of identical decoder blocks."""

    loss: Callable[[Tensor, Tensor], Tensor]
    """Returns the mean loss of logits [b, s, v] and labels [b, s]."""

    def __init__(self, config: NativeConfig, *, kind: str, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.config = config
        self.loss = next_token_loss
        self.packs_documents = False
        """Whether position ids are [b, s], begin anew with each document, and documents are kept apart."""
        self.num_prefix = 0  # Tokens of the prefixes; positions of the sequence start after them
        e, v = config.hidden_size, config.vocab_size
        self.embed = Embedding(v, e, padding_idx=config.pad_token_id, dtype=dtype, device=device)
        learned = config.position_embedding == "learned"
        self.embed_positions = (
            Embedding(config.max_position_embeddings, e, dtype=dtype, device=device) if learned else None
        )
        num_layers, build = config.num_hidden_layers, partial(Block, config, kind=kind, dtype=dtype)
        self.layers = nn.ModuleList(
            block_or_outline(partial(build, device=device), partial(build, device=META), number, num_layers)
            for number in range(num_layers)
        )
        # A post-norm block already ends in a norm.
        self.norm = norm(config, e, dtype, device) if config.norm_placement == "pre" else nn.Identity()
        tied = config.tie_word_embeddings
        self.lm_head = Linear(e, v, False, torch.device("meta") if tied else device, dtype)
        if tied:
            self.lm_head.weight = self.embed.weight
        rope, alibi = config.position_embedding == "rope", config.position_embedding == "alibi"
        self.register_buffer("frequencies", self._frequencies(device) if rope else None, persistent=False)
        self.register_buffer("slopes", self._slopes(device) if alibi else None, persistent=False)

    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Output:
        """Compute logits and, with ``labels``, the mean next-token loss.

        Args:
            input_ids, labels: int64 [b, s]; labels of -100 are ignored.
            inputs_embeds: [b, s, e], instead of ``input_ids``.
            position_ids: int64 [1, s], or [b, s] with ``packs_documents``; None: 0 to s - 1.
        """
        logits = self.lm_head(self.hidden(input_ids, inputs_embeds, position_ids))
        return Output(None if labels is None else self.loss(logits, labels), logits)

    def hidden(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the input of ``lm_head``, [b, s, e], for losses that never hold all logits."""
        x_bse = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        seq = x_bse.shape[1]
        if self.embed_positions is not None:
            learned = self._learned_positions(seq, x_bse.device) if position_ids is None else position_ids
            x_bse = x_bse + self.embed_positions(learned)
        shared = self.position_tensors(seq, x_bse, position_ids)
        for block in self.layers:
            x_bse = block(x_bse, shared)
        return self.norm(x_bse)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise weights from N(0, initializer_range), biases to 0, norms to 1; on meta if recorded."""
        if self.embed.weight.is_meta and not is_deferred():
            return
        for module in without_outlines(self):
            self.init_module(module)

    @torch.no_grad()
    def init_module(self, module: nn.Module) -> None:
        """Initialise the weights and buffers of ``module`` itself, not of its children."""
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(0.0, self.config.initializer_range)
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            module.weight.fill_(1.0)
        bias = getattr(module, "bias", None)
        if bias is not None:
            bias.zero_()
        if module is self:
            device = self.embed.weight.device
            if self.frequencies is not None:
                self.frequencies = self._frequencies(device)
            if self.slopes is not None:
                self.slopes = self._slopes(device)

    def _frequencies(self, device: torch.device) -> Tensor:
        return positions.inverse_frequencies(self.config.rope, self.config.rotary_dim, device)

    def _slopes(self, device: torch.device) -> Tensor:
        return torch.tensor(positions.alibi_slopes(self.config.num_attention_heads), device=device)

    def _learned_positions(self, seq: int, device: torch.device) -> Tensor:
        most = self.config.max_position_embeddings - self.num_prefix
        if seq > most:
            problem = f"the model has {most} learned positions"
            raise InputError(problem, "use a shorter sequence", field="batch.seq", value=seq)
        return torch.arange(self.num_prefix, self.num_prefix + seq, device=device)

    def position_tensors(
        self, seq: int, x_bse: Tensor, position_ids: Tensor | None = None
    ) -> PositionTensors:
        """Compute the tensors that all blocks share, in attention's dtype; arguments as of ``hidden``."""
        device = x_bse.device
        amp = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if amp else x_bse.dtype
        apart = position_ids if self.packs_documents else None
        if self.slopes is not None and self.config.alibi_bias == "per_layer" and apart is None:
            return PositionTensors(slopes=self.slopes)
        first = self.num_prefix
        if apart is not None:
            bias = positions.documents_bias(self.config, apart, self.slopes, dtype)
        elif first:
            bias = positions.prefix_bias(seq, first, dtype, device)
        else:
            bias = positions.additive_bias(self.config, seq, self.slopes, dtype, device)
        if self.frequencies is None:
            return PositionTensors(bias=bias)
        if position_ids is None:
            steps = torch.arange(first, first + seq, dtype=torch.float32, device=device)
        else:
            steps = (position_ids if self.packs_documents else position_ids[0]).float()
        angles = steps[..., None] * self.frequencies.float()
        factor = positions.attention_factor(self.config.rope)
        cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
        return PositionTensors(cos.unsqueeze(-2), sin.unsqueeze(-2), bias)


def next_token_loss(logits_bsv: Tensor, labels_bs: Tensor) -> Tensor:
    """Return the mean next-token cross-entropy in fp32, equal to transformers' ``ForCausalLMLoss``."""
    # Shift the labels: a shifted view of the logits would be copied.
    targets = F.pad(labels_bs[:, 1:], (0, 1), value=IGNORED_LABEL)
    return F.cross_entropy(logits_bsv.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL)


NORMS = {"rmsnorm": nn.RMSNorm, "rmsnorm_unfused": UnfusedRMSNorm, "layernorm": nn.LayerNorm}


def norm(config: NativeConfig, size: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    return NORMS[config.norm](size, eps=config.norm_eps, dtype=dtype, device=device)
