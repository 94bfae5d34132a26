"""The native decoder: equal blocks of attention and a feed-forward part, fused qkv and gate-up projections.

Shapes: b batch, s sequence, e hidden_size, h heads, k key-value heads, d head_dim, f intermediate_size, v vocabulary.

Memory, weights in their own dtype (no autocast): logits have the weights' dtype; the loss takes an fp32 copy of them,
so a bf16 step holds 2 + 4 + 4 bytes a logit (logits, their log-softmax, its gradient) at its peak.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfit.models.native import attention, positions
from trainfit.models.native.config import NativeConfig
from trainfit.spec.errors import InputError

IGNORED_LABEL = -100


class Output(NamedTuple):
    """``loss`` is an fp32 scalar, or None without labels; ``logits`` are [b, s, v]."""

    loss: Tensor | None
    logits: Tensor


class Place(NamedTuple):
    """What the blocks share: RoPE's ``cos`` and ``sin`` ([s, 1, r/2]), a ``bias`` on the scores ([1, h or 1, s, s]).

    ``slopes`` ([h]) in place of ``bias``: each block makes its own from them.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None


class Linear(nn.Linear):
    """A linear layer that waits for ``init_weights``: on a CPU, filling weights twice is most of the building time."""

    def reset_parameters(self) -> None:
        """Leave the weights as allocated."""


class Embedding(nn.Embedding):
    """An embedding that waits for ``init_weights``."""

    def reset_parameters(self) -> None:
        """Leave the weights as allocated."""


class UnfusedRMSNorm(nn.RMSNorm):
    """RMSNorm (arXiv:1910.07467) operation by operation in fp32, as PyTorch ran it before it had a fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        x_fp32 = x.float()
        scale = torch.rsqrt(x_fp32.pow(2).mean(dim=-1, keepdim=True) + (self.eps or 0.0))
        return (x_fp32 * scale * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query causal self-attention; query head i reads key-value head i * k // h. ``kind``: the recipe's word."""

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
        """Keys and values that every query sees besides ([2, tokens, k, d]; prefixed.py)."""

    def forward(self, x_bse: Tensor, place: Place) -> Tensor:
        b, s, _ = x_bse.shape
        q, k, v = self.qkv(x_bse).view(b, s, -1, self.config.head_dim).split(self.heads, dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if place.cos is not None and place.sin is not None:
            q, k = self.turned(q, k, place.cos, place.sin)
            # A copy of v alone: kept as a view it would hold the unrotated q and k until the backward pass.
            v = v.contiguous() if self.prefix is None else v
        if self.prefix is not None:
            prefix_k, prefix_v = self.prefix.to(k.dtype).unsqueeze(1).expand(-1, b, -1, -1, -1)
            k, v = torch.cat((prefix_k, k), dim=1), torch.cat((prefix_v, v), dim=1)
        bias = place.bias
        if place.slopes is not None:
            bias = positions.additive_bias(self.config, s, place.slopes, q.dtype, q.device)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.kind == "eager":
            attended = attention.eager_attention(q, k, v, bias, attention.SOFTMAX[self.config.softmax])
        elif self.kind == "triton":
            attended = attention.own_attention(q, k, v, bias)
        else:
            attended = attention.sdpa(q, k, v, bias)
        return self.out(attended.transpose(1, 2).reshape(b, s, -1))

    def turned(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [b, s, h, d] and keys, turned by their positions."""
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
            # ReLU's backward needs its output, not gate; as a view up would hold gate until then.
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
    """Pre: ``x + part(norm(x))``. Post: ``norm(x + part(x))`` (Vaswani et al. 2017, arXiv:1706.03762, section 3.1)."""

    def __init__(self, config: NativeConfig, *, kind: str, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.post = config.norm_placement == "post"
        self.attention_norm = norm(config, config.hidden_size, dtype, device)
        self.attention = Attention(config, kind=kind, dtype=dtype, device=device)
        self.mlp_norm = norm(config, config.hidden_size, dtype, device)
        self.mlp = FeedForward(config, dtype=dtype, device=device)

    def forward(self, x_bse: Tensor, place: Place) -> Tensor:
        if self.post:
            x_bse = self.attention_norm(x_bse + self.attention(x_bse, place))
            return self.mlp_norm(x_bse + self.mlp(x_bse))
        x_bse = x_bse + self.attention(self.attention_norm(x_bse), place)
        return x_bse + self.mlp(self.mlp_norm(x_bse))


class NativeDecoder(nn.Module):
    """A causal language model; ``config_json`` is the mapping it was built from, written beside saved weights."""

    def __init__(self, config: NativeConfig, *, kind: str, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.config = config
        self.num_prefix = 0
        """Tokens of the blocks' prefixes; the sequence's own positions begin after them."""
        e, v = config.hidden_size, config.vocab_size
        self.embed = Embedding(v, e, padding_idx=config.pad_token_id, dtype=dtype, device=device)
        learned = config.position_embedding == "learned"
        self.embed_positions = (
            Embedding(config.max_position_embeddings, e, dtype=dtype, device=device) if learned else None
        )
        self.layers = nn.ModuleList(
            Block(config, kind=kind, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)
        )
        # A post-norm block ends in a norm; a last one would be its repetition.
        self.norm = norm(config, e, dtype, device) if config.norm_placement == "pre" else nn.Identity()
        tied = config.tie_word_embeddings
        self.lm_head = Linear(e, v, False, torch.device("meta") if tied else device, dtype)
        if tied:
            self.lm_head.weight = self.embed.weight
        rope, alibi = config.position_embedding == "rope", config.position_embedding == "alibi"
        self.register_buffer("frequencies", self._frequencies(device) if rope else None, persistent=False)
        self.register_buffer("slopes", self._slopes(device) if alibi else None, persistent=False)
        self.init_weights()

    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Output:
        """Logits of ``input_ids`` ([b, s] int64) and, with ``labels`` ([b, s], -100 ignored), the mean next-token loss.

        ``inputs_embeds`` ([b, s, e]) in place of ``input_ids``: what the embedding would give.
        """
        logits = self.lm_head(self.hidden(input_ids, inputs_embeds))
        return Output(None if labels is None else next_token_loss(logits, labels), logits)

    def hidden(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Tensor:
        """What ``lm_head`` reads, [b, s, e]: a loss that never holds all logits starts here."""
        x_bse = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        seq = x_bse.shape[1]
        if self.embed_positions is not None:
            x_bse = x_bse + self.embed_positions(self._learned_places(seq, x_bse.device))
        place = self._place(seq, x_bse)
        for block in self.layers:
            x_bse = block(x_bse, place)
        return self.norm(x_bse)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Weights from N(0, initializer_range), biases 0, norms 1, and the position buffers. Nothing to do on meta."""
        if self.embed.weight.is_meta:
            return
        for module in self.modules():
            self.init_module(module)

    @torch.no_grad()
    def init_module(self, module: nn.Module) -> None:
        """The weights and buffers that are ``module``'s own, not its children's."""
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

    def _learned_places(self, seq: int, device: torch.device) -> Tensor:
        most = self.config.max_position_embeddings - self.num_prefix
        if seq > most:
            raise InputError(
                f"the model has {most} learned positions",
                "use a shorter sequence",
                field="batch.seq",
                value=seq,
            )
        return torch.arange(self.num_prefix, self.num_prefix + seq, device=device)

    def _place(self, seq: int, x_bse: Tensor) -> Place:
        """What all blocks share, made once a forward pass in the dtype that attention runs in."""
        device = x_bse.device
        amp = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if amp else x_bse.dtype
        if self.slopes is not None and self.config.alibi_bias == "per_layer":
            return Place(slopes=self.slopes)
        first = self.num_prefix
        bias = (
            positions.prefix_bias(seq, first, dtype, device)
            if first
            else positions.additive_bias(self.config, seq, self.slopes, dtype, device)
        )
        if self.frequencies is None:
            return Place(bias=bias)
        places = torch.arange(first, first + seq, dtype=torch.float32, device=device)
        angles = places[:, None] * self.frequencies.float()
        factor = positions.attention_factor(self.config.rope)
        cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
        return Place(cos[:, None], sin[:, None], bias)


def next_token_loss(logits_bsv: Tensor, labels_bs: Tensor) -> Tensor:
    """Mean cross-entropy of token t + 1 given those up to t, in fp32. Equal to transformers' ``ForCausalLMLoss``."""
    # The labels move, not the logits: a shifted view of the logits would be copied whole.
    targets = F.pad(labels_bs[:, 1:], (0, 1), value=IGNORED_LABEL)
    return F.cross_entropy(logits_bsv.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL)


NORMS = {"rmsnorm": nn.RMSNorm, "rmsnorm_unfused": UnfusedRMSNorm, "layernorm": nn.LayerNorm}


def norm(config: NativeConfig, size: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    return NORMS[config.norm](size, eps=config.norm_eps, dtype=dtype, device=device)
