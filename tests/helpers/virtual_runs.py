"""What tests of the virtual GPU share: catalog models with fewer layers, and a ledger's sums to compare."""

from typing import Any

from tiny_recipe import TINY_LLAMA
from trainfit.catalog.load import model_config
from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.ledger import Ledger, Op
from trainfit.ledger.replay import replay
from trainfit.spec.recipe import Batch, ModelSpec, Recipe

PLAIN = {
    **TINY_LLAMA, "model_type": "trainfit", "num_hidden_layers": 4, "gated_mlp": False, "hidden_act": "relu",
    "position_embedding": "learned", "num_key_value_heads": 4,
}  # fmt: skip
"""A native model whose layers compile fast."""

DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers")


def with_layers(name: str, layers: int | None) -> dict[str, Any]:
    """The catalog's config of a model, at another depth; None: as it is."""
    config = dict(model_config(name))
    if layers is not None:
        key = next(key for key in DEPTH_KEYS if key in config)
        config[key] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
    return config


def recipe_of(config: str | dict[str, Any], implementation: Any = "hf", **fields: Any) -> Recipe:
    """1 x 64 tokens unless ``fields`` say otherwise."""
    model = ModelSpec(config=config, implementation=implementation)
    return Recipe(model=model, **{"batch": Batch(micro=1, seq=64), **fields})


def plain(layers: int, **fields: Any) -> Recipe:
    """A model whose layers compile fast, bf16, 2 x 16 tokens."""
    config = PLAIN | {"num_hidden_layers": layers}
    return recipe_of(config, "native", **{"batch": Batch(micro=2, seq=16), **fields})


def steady(ledger: Ledger) -> list[Op]:
    """The steady step's operations, as traced."""
    return [op for op in ledger.ops if ledger.segments[op.segment].step == "steady"]


def steady_sum(ledger: Ledger, quantity: str) -> float:
    """Sum of a quantity of the steady step's operations over the whole model."""
    return sum(ledger.times(op) * getattr(op, quantity) for op in steady(ledger))


def sums(ledger: Ledger) -> dict[str, Any]:
    """Everything an estimate reads off a ledger."""
    replayed = replay(ledger, CachingAllocator())
    quantities = ("flops", "causal_flops", "model_flops", "model_flops_full", "num_bytes", "calls")
    return {
        "phases": replayed.phases.model_dump(),
        "breakdown": replayed.breakdown.model_dump(),
        "peak_phase": replayed.peak_phase,
        "peak_allocated_bytes": replayed.peak_allocated_bytes,
        "peak_reserved_bytes": replayed.peak_reserved_bytes,
        "params": (ledger.params, ledger.trainable_params),
        "ops_without_flops": ledger.ops_without_flops,
        **{quantity: steady_sum(ledger, quantity) for quantity in quantities},
    }
