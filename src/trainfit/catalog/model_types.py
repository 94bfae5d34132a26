"""Model types of transformers: what closed forms, output layers and parallelism need to know of each.

A row of model_types.toml, here or in one's own catalog folder, is all that a model type takes.
"""

import functools
from typing import Literal

from trainfit.catalog import names
from trainfit.spec.parsing.parse import parse
from trainfit.spec.value import PositiveInt, Value

Parallel = Literal["tensor", "context", "pipeline", "expert"]


class NativeForm(Value):
    """How the native decoder builds a model type of Llama's form."""

    bias_keys: tuple[str, ...] = ()
    """Keys of the config that add biases."""
    qkv_bias: bool = False
    """Queries, keys and values always have a bias."""
    qk_norm: bool = False
    window: bool = False
    """The config's window is that of every layer."""


class ModelType(Value):
    """One row of model_types.toml; a default says what holds of most types."""

    name: str
    feed_forward: Literal["gated", "plain"] | None = None
    """Three matrices or two; None: there is no closed form of its layers."""
    ties_embeddings: bool = False
    """The configuration class ties the output matrix unless the config says otherwise."""
    learned_positions: bool = False
    parallel_blocks: bool = False
    """The feed-forward network reads the same input as attention."""
    window: PositiveInt | None = None
    """Tokens of a window where the config does not say, as in transformers' configuration classes."""
    window_is_switched: bool = False
    """The window counts only with ``use_sliding_window``."""
    full_attention_every: PositiveInt | None = None
    """Every so many layers one sees all tokens, unless the config names its layers."""
    full_attention_every_key: str | None = None
    full_attention_first: PositiveInt | None = None
    """Default of ``max_window_layers``: layers before it see all tokens."""
    logits: Literal["plain", "multiplied", "divided", "capped"] | None = None
    """The output layer's result, or what the value of ``logits_key`` does to it; None: unknown."""
    logits_key: str = ""
    native: NativeForm | None = None
    parallel: tuple[Parallel, ...] = ()
    """Kinds of parallelism whose losses were compared with those of one process."""


@functools.cache
def model_types() -> dict[str, ModelType]:
    """Return the rows by model type."""
    return {
        name: parse(ModelType, {"name": name, **row}, file=names.place(names.MODEL_TYPES, name))
        for name, row in names.rows(names.MODEL_TYPES).items()
    }


def model_type(name: object) -> ModelType:
    """Return the row of a config's ``model_type``; of a type without one the defaults."""
    return model_types().get(str(name)) or ModelType(name=str(name))


def native_types() -> list[str]:
    """Return the model types that the native decoder builds."""
    return [name for name, row in model_types().items() if row.native]


def tried_with(kind: Parallel) -> list[str]:
    """Return the model types whose losses on several ranks were compared with those of one process."""
    return [name for name, row in model_types().items() if kind in row.parallel]
