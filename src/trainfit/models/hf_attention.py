"""trainfit's FlashAttention kernels as an attention function in transformers' registry.

Features that the kernels lack are refused, by the config or by the arguments that layers pass. Plain causal
attention gets no mask; any other mask is transformers' SDPA mask, which is refused. So a sliding window
longer than the sequence runs, and a shorter one does not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor, nn

from trainfit.kernels.flash_attention.op import MAX_HEAD_SIZE, attend, register
from trainfit.spec.errors import InputError
from trainfit.virtual.quiet_imports import quiet_imports
from trainfit.virtual.trace.exclusive import exclusive

NAME = "trainfit_triton"
"""Name in transformers' registry, which treats names with "flash", "sdpa" or "flex" as its own."""
REMEDY = "use attention: sdpa or eager"
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
SOFTCAP = "attn_logit_softcapping"  # Keys of config classes
IGNORED = frozenset(
    """
    sliding_window position_ids output_attentions output_hidden_states use_cache cache_position return_dict
    num_items_in_batch logits_to_keep past_key_values
    """.split()
)
"""Arguments of layers that change nothing here; a window shorter than the sequence comes with a mask."""
MEANING = {"softcap": "capped scores", "s_aux": "attention sinks", "position_bias": "a bias on the scores"}
"""Arguments that change the result."""


def register_attention() -> None:
    """Register ``attn_implementation=NAME`` with transformers."""
    with quiet_imports():
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface

    register()  # torch.compile cannot trace this.
    AttentionInterface.register(NAME, own_attention)
    AttentionMaskInterface.register(NAME, own_mask)


def own_mask(*, q_length: int, kv_length: int, **more: Any) -> Tensor | None:
    """Return None for plain causal attention, also under torch.compile, else SDPA's mask."""
    from transformers.masking_utils import sdpa_mask

    # False if the caller also masks something else.
    is_causal = more.get("allow_is_causal_skip", True) and more.get("attention_mask") is None
    window = more.get("local_size")
    if is_causal and q_length == kv_length and (window is None or window > kv_length):
        return None
    return sdpa_mask(q_length=q_length, kv_length=kv_length, **more)


@contextmanager
def no_packed_sequences() -> Iterator[None]:
    """Disable transformers' search for packed sequences in the position ids.

    It reads their values, or builds a mask where it cannot, in a model that is compiled whole. The function
    is process-wide, so traces in other threads wait.
    """
    import transformers.masking_utils as masking_utils

    with exclusive():
        original = masking_utils.find_packed_sequence_indices
        # The same function in each step: Dynamo compiles again for another.
        masking_utils.find_packed_sequence_indices = _none_packed
        try:
            yield
        finally:
            masking_utils.find_packed_sequence_indices = original


def _none_packed(position_ids: Tensor) -> None:
    """Report that each row is one sequence."""


def refuse_config(config: Any) -> None:
    """Refuse a model class with attention of its own, and keys for dropout or capped scores."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is not None and not found._supports_attention_backend:
        _stop(f"{found.__name__} has attention of its own, outside transformers' registry")
    text = config.get_text_config()
    for key in DROPOUTS:
        if getattr(text, key, 0.0):
            problem = "attention: triton drops nothing out"
            raise InputError(problem, REMEDY, field=f"model.config.{key}", value=getattr(text, key))
    if (cap := getattr(text, SOFTCAP, None)) is not None:
        raise InputError(
            "attention: triton caps no scores", REMEDY, field=f"model.config.{SOFTCAP}", value=cap
        )


def own_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the output [b, s, h, d] for query [b, h, s, d], key and value [b, k, s, d].

    Masks, dropout, unequal head sizes or lengths, and unknown arguments are refused.
    """
    if attention_mask is not None:
        _stop("the model needs a mask: a sliding window shorter than the sequence, padding or a prefix")
    if dropout:
        _stop("the model drops attention out")
    if query.shape[2] != key.shape[2]:
        _stop("the model attends to past keys")
    d, d_v = query.shape[-1], value.shape[-1]
    if d != d_v or d > MAX_HEAD_SIZE:
        _stop(f"head size {d} with values of {d_v}: the kernels take equal ones up to {MAX_HEAD_SIZE}")
    for name, setting in options.items():
        if name not in IGNORED and setting is not None and setting is not False:
            _stop(f"the model needs {MEANING.get(name, 'an unknown option')} ({name})")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    # One of several ranks of a sequence also gathers keys.
    run = getattr(module, "attend", attend)
    return run(query, key, value, causal, scaling).transpose(1, 2).contiguous(), None


def _stop(problem: str) -> NoReturn:
    raise InputError(problem, REMEDY, field="attention", value="triton")
