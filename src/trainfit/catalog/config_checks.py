"""Check a config.json before anything is built from it: plain data, no remote code, valid sizes and values.

Keys are recognised by their names at any depth, as model types share them. Whether the model type can be
built is decided in ``models/``.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from trainfit.catalog.other_files import refuse_other_file
from trainfit.catalog.text_model import LAYER_KEYS, text_model
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.plain_data import FLOAT_TAG

REMOTE_CODE_KEYS = ("auto_map", "custom_pipelines")
"""Keys that name Python code of a repository, which is never run."""
TRUST_KEY = "trust_remote_code"

LARGEST = {
    2**31 - 1: ("max_position_embeddings", "n_positions"),
    2**24: ("vocab_size",),
    2**20: ("hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim", "moe_intermediate_size"),
    2**16: (
        "num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "num_kv_heads", "head_dim",
        "num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok",
    ),
    256: LAYER_KEYS,
}  # fmt: skip
"""Sizes that must be whole numbers from 1 to this where they stand (null means the model type's default).

The limits are far over any model (the deepest published have 126 layers); beyond them a tensor's 64-bit size
overflows, or building takes minutes.
"""

MAY_BE_ZERO = re.compile(r"experts|^moe_|^head_dim$")
"""Sizes of a mixture of experts, 0 in a dense model of its type, and what other keys may replace."""
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_EXPERT_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
"""Keys of the experts that a layer has, and of those that each token meets."""
HEAD_PARTS = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
"""Keys with which a type's attention does without ``head_dim``."""

LARGEST_OF_KIND = (
    (re.compile(r"^(?!max_).*(?:layers?|blocks|depth|cycles|per_stack|layer_period)$"), 256),
    (re.compile(r"_mult$|functions$|^attention_types$"), 256),
    (re.compile(r"^num_labels$|(?:^|_)(?:heads?|experts?|groups?|codebooks|hashes)$|ngram"), 2**16),
    (re.compile(r"^(?:num|n)_"), 2**20),
    (re.compile(r""), 2**31 - 1),
)
"""Pattern of a key, anywhere in a config -> its largest whole number; the first that fits holds."""
LARGE_COUNTS = re.compile(r"vocab|positions$|ctx$|tokens$")
"""Keys of the kinds above that count what is no module: up to 2**31 - 1."""
NO_SIZES = re.compile(r"param(?:eter)?s$|train\w*_(?:tokens|samples|steps)$|^total_")
"""Keys that count parameters, or what a checkpoint was trained on, and shape nothing: of any size."""

SWITCHES = {"return_dict": True, "torchscript": False}
"""Keys that set what transformers' forward returns -> the value that training needs."""
HEAD_KEYS = ("num_attention_heads", "n_head", "num_heads")
WIDTH_KEYS = ("hidden_size", "n_embd", "d_model")
LARGEST_HEAD = 2**16  # No attention kernel takes a wider head
KEY_VALUE_HEAD_KEYS = ("num_key_value_heads", "num_kv_heads")
"""Config keys of the key-value heads, each shared by a group of query heads."""
ROPE_MAPPINGS = ("rope_scaling", "rope_parameters", "rope")


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


def check_config(config: Any, *, file: str = "") -> dict[str, Any]:
    """Return the text model's mapping; an InputError refuses what cannot be built and trained."""
    try:
        return _checked(config)
    except InputError as error:
        raise error.in_file(file) from None


def _checked(config: Any) -> dict[str, Any]:
    if not isinstance(config, dict):
        raise InputError("not a mapping", "write a config.json's object", field="model.config", value=config)
    refuse_other_file(config)
    if config.get(TRUST_KEY):
        remedy = "remove the key: it changes no layer"
        raise _wrong(TRUST_KEY, config[TRUST_KEY], "code of a repository is never run", remedy)
    found = text_model(config)
    text, path = found.config, found.path
    for largest, keys in LARGEST.items():
        for key in keys:
            _check_size(key, text.get(key), largest, path)
    leaves = list(_leaves(text, path.rstrip(".")))
    for leaf in leaves:
        _check_count(leaf)
        if leaf.key in ("short_factor", "long_factor") and leaf.num_items == 1:
            # torch would broadcast it over all frequencies.
            remedy = "write one for each rotary frequency, half a head's rotated size"
            raise _wrong(leaf.path.removesuffix("[0]"), [leaf.value], "a list of one factor", remedy)
    _check_heads(text, path)
    _check_zeros(text, path)
    for key, needed in SWITCHES.items():
        if key in text and text[key] is not needed:
            problem = f"{'null, but ' * (text[key] is None)}training needs the model's outputs by name"
            raise _wrong(path + key, text[key], problem, f"write {str(needed).lower()}, or leave it out")
    for leaf in leaves:
        _check_value(leaf)
    return text


def remote_code_keys(config: Any) -> tuple[str, ...]:
    """Return the keys of the config that name code of a repository."""
    return tuple(key for key in REMOTE_CODE_KEYS if isinstance(config, dict) and config.get(key))


class Leaf(NamedTuple):
    """A value of the config that is no mapping and no list, or an item of a list."""

    key: str
    path: str
    value: Any
    in_rope: bool
    num_items: int | None  # Length of the list that it is in; None: in no list


def _leaves(
    value: Any, path: str = "", key: str = "", in_rope: bool = False, num_items: int | None = None
) -> Iterator[Leaf]:
    if isinstance(value, dict) and value.keys() == {FLOAT_TAG}:
        value = float(value[FLOAT_TAG]) if value[FLOAT_TAG] in ("Infinity", "-Infinity") else value[FLOAT_TAG]
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}".lstrip("."), name, in_rope or name in ROPE_MAPPINGS)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]", key, in_rope, len(value))
    else:
        yield Leaf(key, path, value, in_rope, num_items)


def _check_count(leaf: Leaf) -> None:
    """Refuse a number far over any model's, under whatever name."""
    if isinstance(leaf.value, bool) or not isinstance(leaf.value, int | float) or NO_SIZES.search(leaf.key):
        return
    largest = next(limit for pattern, limit in LARGEST_OF_KIND if pattern.search(leaf.key))
    holds_ids = leaf.num_items is not None and leaf.key != "attention_types"
    if LARGE_COUNTS.search(leaf.key) or holds_ids:
        largest = 2**31 - 1
    if leaf.value > largest and (isinstance(leaf.value, int) or largest < 2**31 - 1):
        raise _wrong(leaf.path, leaf.value, "far over any model's", f"write a number of at most {largest:,}")


def _check_value(leaf: Leaf) -> None:
    """Refuse a number with which no model trains."""
    allowed = _allowed_range(leaf.key, in_rope=leaf.in_rope)
    if allowed is None or leaf.value is None or isinstance(leaf.value, bool):
        return
    if not isinstance(leaf.value, int | float):
        raise _wrong(leaf.path, leaf.value, "not a number", allowed.remedy)
    if not allowed.holds(leaf.value):
        raise _wrong(leaf.path, leaf.value, "a model of it cannot train", allowed.remedy)


def _check_size(key: str, value: Any, largest: int, path: str) -> None:
    if isinstance(value, list):  # One for each layer, as Gemma 3n has it.
        for index, item in enumerate(value):
            _check_size(f"{key}[{index}]", item, largest, path)
        return
    least = 0 if MAY_BE_ZERO.search(key) else 1
    if value is not None and (type(value) is not int or not least <= value <= largest):
        raise _wrong(path + key, value, "not a size", f"write a whole number from {least} to {largest:,}")


def _check_heads(config: dict[str, Any], path: str) -> None:
    """Query heads share key-value heads in equal groups: one number must divide the other."""
    heads = next((config[key] for key in HEAD_KEYS if isinstance(config.get(key), int)), None)
    width = next((config[key] for key in WIDTH_KEYS if isinstance(config.get(key), int)), 0)
    if heads is None:
        return
    if "head_dim" not in config and width // heads > LARGEST_HEAD:
        problem = f"{heads} heads of {width} elements are over {LARGEST_HEAD:,} each"
        raise _wrong(path + "num_attention_heads", heads, problem, "correct one of the two")
    for key in KEY_VALUE_HEAD_KEYS:
        shared = config.get(key)
        if isinstance(shared, int) and heads % shared:
            problem = f"does not divide the {heads} attention heads"
            raise _wrong(path + key, shared, problem, f"write a divisor of {heads}")


def _check_zeros(config: dict[str, Any], path: str) -> None:
    """Refuse a size of 0 where nothing stands for it: experts that no token meets, heads without elements."""
    counts = [config[key] for key in EXPERT_KEYS if key in config]
    for key in CHOSEN_EXPERT_KEYS:
        if config.get(key) == 0 and (any(counts) or not counts):
            problem = "no token would meet an expert"
            raise _wrong(path + key, 0, problem, "write at least 1, or 0 for the number of experts too")
    if config.get("head_dim") == 0 and not any(config.get(key) for key in HEAD_PARTS):
        raise _wrong(path + "head_dim", 0, "not a size", "write at least 1, or leave it out")


def _wrong(key: str, value: Any, problem: str, remedy: str) -> InputError:
    return InputError(problem, remedy, field=f"model.config.{key}", value=value)


def _allowed_range(key: str, *, in_rope: bool) -> Range | None:
    """Return the range of a key; None: any value."""
    if in_rope and key in OF_ROPE:
        return OF_ROPE[key]
    return next((allowed for pattern, allowed in ANYWHERE.items() if re.search(pattern, key)), None)
