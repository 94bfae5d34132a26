"""Our FlashAttention kernels in transformers' models, through its registry of attention functions.

What a model asks of attention and our kernels do not do is refused: from its config where that says it, else by the
arguments that its layers pass. Masks come from transformers' own mask function for SDPA, which gives none where causal
attention says it all; so a sliding window longer than the sequence runs, and a shorter one is refused.
"""

from typing import Any, NoReturn

from torch import Tensor, nn

from trainfit.kernels.flash_attention import MAX_HEAD_SIZE, attend, register
from trainfit.spec.errors import InputError

NAME = "trainfit_triton"
"""In transformers' registry. A name with "flash", "sdpa" or "flex" in it would be taken for one of transformers' own."""
REMEDY = "use attention: sdpa or eager"
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
SOFTCAP = "attn_logit_softcapping"
"""Keys of the config classes."""
NO_MATTER = frozenset(
    """
    sliding_window position_ids output_attentions output_hidden_states use_cache cache_position return_dict
    num_items_in_batch logits_to_keep past_key_values
    """.split()
)
"""Arguments that layers pass on and that change nothing here: a window shorter than the sequence comes with a mask."""
MEANING = {"softcap": "capped scores", "s_aux": "attention sinks", "position_bias": "a bias on the scores"}
"""Arguments that change the result."""


def register_attention() -> None:
    """Make ``attn_implementation=NAME`` known to transformers, with SDPA's masks; a second call changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    register()  # Here, not when it first runs: torch.compile cannot trace it.
    AttentionInterface.register(NAME, own_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def refuse_config(config: Any) -> None:
    """Nothing, if the config asks nothing of attention that our kernels do not do.

    Raises:
        InputError: the key that does, by its name.
    """
    text = config.get_text_config()
    for key in DROPOUTS:
        if getattr(text, key, 0.0):
            raise InputError(
                "attention: triton drops nothing out",
                f"set it to 0, or {REMEDY}",
                field=f"model.config.{key}",
                value=getattr(text, key),
            )
    if getattr(text, SOFTCAP, None) is not None:
        raise InputError(
            "attention: triton caps no scores",
            REMEDY,
            field=f"model.config.{SOFTCAP}",
            value=getattr(text, SOFTCAP),
        )


def refuse_model(model: Any) -> None:
    """Nothing, if the model's layers ask transformers' registry for their attention.

    Raises:
        InputError: they have attention of their own, so ours would not run.
    """
    if not model._supports_attention_backend:
        _stop(f"{type(model).__name__} has attention of its own, outside transformers' registry")


def own_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Output [b, s, h, d] of query [b, h, s, d], key and value [b, k, s, d]; no attention weights.

    Raises:
        InputError: a mask, dropout, unequal head sizes or lengths, or an argument that is not known.
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
    for name, setting in asked.items():
        if name not in NO_MATTER and setting is not None and setting is not False:
            _stop(f"the model asks for {MEANING.get(name, 'what is not known here')} ({name})")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    return attend(query, key, value, causal, scaling).transpose(1, 2).contiguous(), None


def _stop(problem: str) -> NoReturn:
    raise InputError(problem, REMEDY, field="attention", value="triton")
