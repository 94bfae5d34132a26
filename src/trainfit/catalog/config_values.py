"""Check the numbers of a config.json that shape no tensor: whether a model with them can train.

Keys are recognised by their names at any depth, as model types share them: in nested configs, and in RoPE
parameters for each layer type.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainfit.spec.errors import InputError

LARGEST_INITIAL_STD = 10.0
"""Of random weights; the published configs' largest is 1. Activations beyond it overflow in a few layers."""
LARGEST_EPS = 1.0
"""Added to a variance of about 1: a larger one leaves less than half of a normalised signal."""


@dataclass(frozen=True)
class Range:
    """Allowed numbers of a key: ``above`` and ``below`` exclusive, ``at_least`` and ``at_most`` inclusive."""

    remedy: str
    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether the number is in the range."""
        return (
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )


POSITIVE = Range("write a number above 0", above=0)
NOT_NEGATIVE = Range("write a number of at least 0", at_least=0)
SHARE = Range("write a share above 0, at most 1", above=0, at_most=1)
DROPPED = Range("write a share from 0 to below 1; 1 would drop everything", at_least=0, below=1)
EPS = Range(f"write a number from 0 to {LARGEST_EPS:g}", at_least=0, at_most=LARGEST_EPS)
STD = Range(f"write a number above 0, at most {LARGEST_INITIAL_STD:g}", above=0, at_most=LARGEST_INITIAL_STD)

ANYWHERE = tuple(
    (re.compile(pattern), allowed)
    for pattern, allowed in (
        (r"rope_theta$|(?:^|_)rope_base$|rotary(?:_emb)?_base$|rope\w*_base_freq$", POSITIVE),
        (r"^(?:partial_rotary_factor|rotary_pct|rope_pct)$", SHARE),
        (r"(?:^|_)(?:initializer_range|init_std|initializer_factor|init_range)$", STD),
        (r"(?:^|_)eps(?:ilon)?(?:$|_)", EPS),
        (
            r"dropout(?:_p|_prob|_rate|_ratio)?$|(?:^|_)pdrop$|layerdrop$"
            r"|(?:^|_)drop_(?:path_)?(?:rate|prob)$",
            DROPPED,
        ),
        (r"^(?:attn|final)_logit_softcapping$", POSITIVE),
        (r"softcap(?:ping)?$", NOT_NEGATIVE),
    )
)
"""Pattern of a key -> what it may be, wherever the key stands; the first that fits holds."""
OF_ROPE = {
    "factor": POSITIVE,
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "original_max_position_embeddings": POSITIVE,
    "beta_fast": POSITIVE,
    "beta_slow": POSITIVE,
    "attention_factor": POSITIVE,
    "short_factor": POSITIVE,
    "long_factor": POSITIVE,
    "mscale": NOT_NEGATIVE,
    "mscale_all_dim": NOT_NEGATIVE,
}
"""Keys of ``rope_scaling`` and ``rope_parameters``, which mean something else elsewhere."""
ROPE_MAPPINGS = ("rope_scaling", "rope_parameters", "rope")


def check_values(config: dict[str, Any], *, file: str = "") -> None:
    """Refuse a config that cannot train.

    Raises:
        InputError: naming the first key whose number is out of its range.
    """
    for field, key, value, in_rope in _leaves(config, "model.config", in_rope=False):
        allowed = _range(key, in_rope)
        if allowed is None or value is None or isinstance(value, bool):
            continue
        if not isinstance(value, int | float):
            raise InputError("not a number", allowed.remedy, field=field, value=value, file=file)
        if not allowed.holds(value):
            raise InputError(
                "a model of it cannot train", allowed.remedy, field=field, value=value, file=file
            )


def _range(key: str, in_rope: bool) -> Range | None:
    if in_rope and key in OF_ROPE:
        return OF_ROPE[key]
    return next((allowed for pattern, allowed in ANYWHERE if pattern.search(key)), None)


def _leaves(data: dict[str, Any], path: str, *, in_rope: bool) -> Iterator[tuple[str, str, Any, bool]]:
    """Yield each value with its path, its key and whether it is a RoPE parameter, items of lists too."""
    for key, value in data.items():
        field = f"{path}.{key}"
        rope = in_rope or key in ROPE_MAPPINGS
        if isinstance(value, dict):
            yield from _leaves(value, field, in_rope=rope)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    yield from _leaves(item, f"{field}[{index}]", in_rope=rope)
                else:
                    yield f"{field}[{index}]", key, item, rope
        else:
            yield field, key, value, rope
