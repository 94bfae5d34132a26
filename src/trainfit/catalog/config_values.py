"""Ranges of the numbers of a config.json that shape no tensor, with which a model can train."""

import re
from collections.abc import Callable
from typing import NamedTuple

LARGEST_INITIAL_STD = 10.0
"""Of random weights; the published configs' largest is 1. Activations beyond it overflow in a few layers."""
LARGEST_EPS = 1.0  # Added to a variance of about 1: a larger one leaves less than half of a normalised signal


class Range(NamedTuple):
    """Allowed numbers of a key."""

    remedy: str
    holds: Callable[[float], bool]


POSITIVE = Range("write a number above 0", lambda number: number > 0)
OR_NONE = POSITIVE._replace(remedy="write a number above 0, or null for none")
NOT_NEGATIVE = Range("write a number of at least 0", lambda number: number >= 0)
SHARE = Range("write a share above 0, at most 1", lambda number: 0 < number <= 1)
DROPPED = Range("write a share from 0 to below 1; 1 would drop everything", lambda number: 0 <= number < 1)
EPS = Range(f"write a number from 0 to {LARGEST_EPS:g}", lambda number: 0 <= number <= LARGEST_EPS)
STD = Range(
    f"write a number above 0, at most {LARGEST_INITIAL_STD:g}",
    lambda number: 0 < number <= LARGEST_INITIAL_STD,
)

ANYWHERE = {
    r"^layer_rope_theta$": NOT_NEGATIVE,  # 0: a layer without positions
    r"rope_theta$|(?:^|_)rope_base$|rotary(?:_emb)?_base$|rope\w*_base_freq$": POSITIVE,
    r"^(?:partial_rotary_factor|rotary_pct|rope_pct)$": SHARE,
    r"(?<!alphas)(?:^|_)(?:initializer_range|init_std|initializer_factor|init_range)$": STD,
    r"(?:^|_)eps(?:ilon)?(?:$|_)": EPS,
    r"dropout(?:_p|_prob|_rate|_ratio)?$|(?:^|_)pdrop$|layerdrop$": DROPPED,
    r"(?:^|_)drop_(?:path_)?(?:rate|prob)$": DROPPED,
    r"^(?:attn|final)_logit_softcapping$": OR_NONE,
    r"softcap(?:ping)?$": NOT_NEGATIVE,
}
"""Pattern of a key -> its range, wherever the key stands; the first that fits holds."""
OF_ROPE = {
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "attention_factor"), POSITIVE),
    **dict.fromkeys(("original_max_position_embeddings", "beta_fast", "beta_slow"), POSITIVE),
    **dict.fromkeys(("short_factor", "long_factor"), POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), NOT_NEGATIVE),
}
"""Keys of ``rope_scaling`` and ``rope_parameters``, which mean something else elsewhere."""


def allowed_range(key: str, *, in_rope: bool) -> Range | None:
    """Return the range of a key; None: any value."""
    if in_rope and key in OF_ROPE:
        return OF_ROPE[key]
    return next((allowed for pattern, allowed in ANYWHERE.items() if re.search(pattern, key)), None)
