"""Replace norms, gated feed-forward parts and rotary embeddings of Llama-like models by trainfit's kernels.

Modules and parameters keep their names; the modules' classes get a forward that calls kernels/. A
transformers class is recognised by its code, which transformers copies from family to family: its bytecode
has to equal Llama's (attention also Mistral's, Qwen2's or Qwen3's).
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from torch import Tensor, nn

from trainfit.kernels.rms_norm import op as rms_norm
from trainfit.kernels.rope import op as rope
from trainfit.kernels.rope import split
from trainfit.kernels.swiglu import op as swiglu
from trainfit.models.layers import require_blocks
from trainfit.models.native.decoder import Attention, FeedForward, NativeDecoder, PositionTensors
from trainfit.spec.errors import InputError

SILU = ("silu", "silu_unfused")
RMS = ("rmsnorm", "rmsnorm_unfused")
GATED = "gated SiLU feed-forward part"
REMEDY = "use block_kernels: standard"


def use_block_kernels(model: nn.Module) -> None:
    """Replace the forward of norms, feed-forward parts and attention; models unlike Llama are refused."""
    for kernel in (rms_norm, swiglu, rope):
        kernel.register()  # torch.compile cannot trace this.
    _replace(_of_native(model) if isinstance(model, NativeDecoder) else _of_transformers(model))


def use_swiglu_kernels(model: nn.Module) -> None:
    """Replace the forward of feed-forward parts alone.

    Raises:
        InputError: a feed-forward part of another form than Llama's.
    """
    swiglu.register()  # torch.compile cannot trace this.
    _replace(_swiglu_of_native(model) if isinstance(model, NativeDecoder) else _swiglu_of_transformers(model))


def use_split_kernels(model: nn.Module) -> None:
    """Replace the forward of feed-forward parts and attention of the native decoder.

    Raises:
        InputError: a model of transformers, norms of queries, heads that are rotated in part, or a
            feed-forward part of another form than Llama's.
    """
    if not isinstance(model, NativeDecoder):
        raise _refusal(
            "the kernels replace the native decoder's parts", SPLIT, "use model.implementation: native"
        )
    _check_native(model, (*OF_SWIGLU, "position_embedding"), SPLIT)
    if model.config.qk_norm or model.config.rotary_dim != model.config.head_dim:
        raise _refusal("the kernels rotate whole heads without norms of their own", SPLIT)
    swiglu.register()
    split.register()
    of_attention = [(one, SplitAttention) for one in model.modules() if isinstance(one, Attention)]
    _replace([*_swiglu_of_native(model), *of_attention])


def _replace(replacements: Iterable[tuple[nn.Module, type[nn.Module]]]) -> None:
    for module, replacement in dict(replacements).items():
        module.__class__ = replacement


class KernelRMSNorm(nn.RMSNorm):
    """RMSNorm in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None, "every config has one"
        return rms_norm.rms_norm(x, self.weight, self.eps)


class KernelFeedForward(FeedForward):
    """``down(silu(gate(x)) * up(x))`` with gate and up as halves of one product."""

    def forward(self, x_bse: Tensor) -> Tensor:
        return self.down(swiglu.swiglu(self.up(x_bse)))


class KernelAttention(Attention):
    """Attention that rotates queries and keys in one kernel."""

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = rope.rope(q.transpose(1, 2), k.transpose(1, 2), cos.squeeze(-2), sin.squeeze(-2))
        return q.transpose(1, 2), k.transpose(1, 2)


class SplitAttention(Attention):
    """Attention whose queries, keys and values are split and rotated in one kernel, as is their gradient."""

    def split(self, qkv: Tensor, shared: PositionTensors) -> tuple[Tensor, Tensor, Tensor]:
        assert shared.cos is not None
        assert shared.sin is not None
        heads, groups, _ = self.heads
        return split.split_rotated(qkv, shared.cos.squeeze(-2), shared.sin.squeeze(-2), heads, groups)


NATIVE: dict[type[nn.Module], type[nn.Module]] = {
    nn.RMSNorm: KernelRMSNorm,
    FeedForward: KernelFeedForward,
    Attention: KernelAttention,
}


SUPPORTED = {"norm": RMS, "hidden_act": SILU, "gated_mlp": (True,), "position_embedding": ("rope",)}
"""Field of a native config -> its values that the kernels support."""
SPLIT = "swiglu-rope"
OF_SWIGLU = ("hidden_act", "gated_mlp")


def _check_native(model: NativeDecoder, fields: Iterable[str], kernels: str) -> None:
    for field in fields:
        if (value := getattr(model.config, field)) not in SUPPORTED[field]:
            supported = " or ".join(map(str, SUPPORTED[field]))
            raise _refusal(f"the kernels support {field} {supported}, and this model has {value}", kernels)


def _swiglu_of_native(model: NativeDecoder) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    _check_native(model, OF_SWIGLU, "swiglu")
    for module in model.modules():
        if isinstance(module, FeedForward):
            yield module, KernelFeedForward


def _of_native(model: NativeDecoder) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    _check_native(model, SUPPORTED, "triton")
    for module in model.modules():
        for kind, replacement in NATIVE.items():
            if isinstance(module, kind):
                yield module, replacement


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(swiglu.swiglu(self.gate_proj(x), self.up_proj(x)))


def _attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run transformers' attention with the rotation in one kernel."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (layer(hidden_states).view(shape) for layer in (self.q_proj, self.k_proj, self.v_proj))
    if hasattr(self, "q_norm"):
        q, k = self.q_norm(q), self.k_norm(k)
    # transformers repeats each angle for both elements of its pair.
    cos, sin = (t[..., : t.shape[-1] // 2].expand(q.shape[0], -1, -1) for t in position_embeddings)
    q, k = rope.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    v = v.transpose(1, 2)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    out, weights = self.trainfit_attend(
        q, k, v, attention_mask, dropout=self.attention_dropout if self.training else 0.0, **kwargs
    )
    return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


def _attend_of(forward: Callable[..., Any], window: str) -> Callable[..., Any]:
    """Return the attention function of a family's forward; ``window``: the holder of its sliding window."""
    found = inspect.unwrap(forward).__globals__
    functions, eager = found["ALL_ATTENTION_FUNCTIONS"], found["eager_attention_forward"]

    def attend(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        function = functions.get_interface(self.config._attn_implementation, eager)
        if window == "config":
            kwargs["sliding_window"] = getattr(self.config, "sliding_window", None)
        elif window == "layer":
            kwargs["sliding_window"] = self.sliding_window
        return function(self, q, k, v, mask, scaling=self.scaling, **kwargs)

    return attend


class _Forms:
    """Bytecode of the supported norms, feed-forward parts, rotations and attentions."""

    def __init__(self) -> None:
        from transformers.models.llama import modeling_llama as llama
        from transformers.models.mistral.modeling_mistral import MistralAttention
        from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
        from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

        self.norm, self.mlp = _code(llama.LlamaRMSNorm.forward), _code(llama.LlamaMLP.forward)
        self.rotation = _code(llama.apply_rotary_pos_emb)
        self.attention = {
            _code(llama.LlamaAttention.forward): "none",
            _code(MistralAttention.forward): "config",
            _code(Qwen2Attention.forward): "layer",
            _code(Qwen3Attention.forward): "layer",
        }

    def replacement(self, module: nn.Module) -> tuple[str, type[nn.Module]] | None:
        """Return the kind of a module and its replacement class; None if its code is not supported."""
        kind = type(module)
        code = _code(kind.forward)
        if code == self.norm:
            return "norm", _subclass(kind, _norm_forward)
        if code == self.mlp and isinstance(getattr(module, "act_fn", None), _silus()):
            return GATED, _subclass(kind, _mlp_forward)
        rotation = inspect.unwrap(kind.forward).__globals__.get("apply_rotary_pos_emb")
        if code in self.attention and rotation is not None and _code(rotation) == self.rotation:
            return "attention", _subclass(kind, _attention_forward, self.attention[code])
        return None


def _code(function: Any) -> tuple[Any, ...]:
    """Return a function's instructions with their names and constants."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return (None,) if code is None else (code.co_code, code.co_names, code.co_consts)


def _silus() -> tuple[type, ...]:
    from transformers.activations import ACT2CLS

    found = ACT2CLS["silu"]
    return (nn.SiLU, found[0] if isinstance(found, tuple) else found)


@cache
def _subclass(kind: type[nn.Module], forward: Callable[..., Any], window: str = "") -> type[nn.Module]:
    """Return one class for all modules of a kind, so that they share compiled code."""
    members: dict[str, Any] = {"forward": forward}
    if window:
        members["trainfit_attend"] = _attend_of(kind.forward, window)
    return type(f"Kernel{kind.__name__}", (kind,), members)


def _of_transformers(model: nn.Module) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    forms = _Forms()
    for block in require_blocks(model, "block_kernels", "triton", REMEDY):
        parts: set[str] = set()
        for module in block.modules():
            found = forms.replacement(module)
            if found is not None:
                parts.add(found[0])
            elif "Norm" in type(module).__name__:
                raise _refusal(f"{type(module).__name__} is no norm like Llama's")
        for part in ("norm", "attention", GATED):
            if part not in parts:
                raise _refusal(f"{type(block).__name__} has no {part} like Llama's")
    for module in model.modules():
        found = forms.replacement(module)
        if found is not None:
            yield module, found[1]


def _swiglu_of_transformers(model: nn.Module) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    forms = _Forms()
    for block in require_blocks(model, "block_kernels", "swiglu", REMEDY):
        found = {module: forms.replacement(module) for module in block.modules()}
        gated = [(module, one[1]) for module, one in found.items() if one is not None and one[0] == GATED]
        if not gated:
            raise _refusal(f"{type(block).__name__} has no {GATED} like Llama's", "swiglu")
        yield from gated


def _refusal(problem: str, kernels: str = "triton", remedy: str = REMEDY) -> InputError:
    return InputError(problem, remedy, field="block_kernels", value=kernels)
