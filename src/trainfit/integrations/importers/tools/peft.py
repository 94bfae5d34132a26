"""PEFT's adapter_config.json, and the keyword arguments of a LoraConfig."""

from trainfit.integrations.importers.base import Importer, Reading
from trainfit.integrations.importers.vocabulary import (
    leave_all,
    take_adapter_variants,
    take_lora,
    take_targets,
)
from trainfit.spec.imported import Change

IDLE = """
task_type peft_type auto_mapping peft_version revision inference_mode fan_in_fan_out megatron_config
megatron_core eva_config corda_config loftq_config init_lora_weights qalora_group_size ensure_weight_tying
velora_config lora_ga_config kasa_config monteclora_config
""".split()
BOTH: tuple[Change, ...] = ("memory", "time")
WITHOUT: dict[str, tuple[tuple[Change, ...], str]] = {
    "trainable_token_indices": (BOTH, "rows of the embedding that train next to the adapter"),
    "layers_to_transform": (BOTH, "an adapter on some layers; predicted on all"),
    "layers_pattern": (BOTH, "an adapter on some layers; predicted on all"),
    "exclude_modules": (BOTH, "modules without an adapter; predicted with one"),
    "target_parameters": (BOTH, "expert weights with an adapter"),
    "rank_pattern": (BOTH, "other ranks of some modules"),
    "alpha_pattern": (("numbers",), "other scales of some modules"),
    "layer_replication": (BOTH, "layers that are repeated"),
    "lora_bias": (BOTH, "biases that train"),
    "use_qalora": (BOTH, "QALoRA pools its input"),
    "alora_invocation_tokens": (("numbers",), "an adapter after some tokens only"),
    "arrow_config": (BOTH, "routed adapters"),
    "use_bdlora": (BOTH, "block-diagonal adapters"),
}
OF_THE_MODEL = (
    "token_dim",
    "num_layers",
    "num_attention_heads",
    "num_transformer_submodules",
    "init_weights",
)
"""Sizes of the base, which PEFT writes once it has seen it, and how the tokens begin."""
OTHER_KINDS = {"PROMPT_TUNING": "prompt", "PREFIX_TUNING": "prefix", "P_TUNING": "p-tuning"}


def read(reading: Reading) -> None:
    """Read an adapter_config.json."""
    kind = reading.text("peft_type", "LORA").upper()
    if reading.has("base_model_name_or_path"):
        reading.know("model", reading.text("base_model_name_or_path"), "base_model_name_or_path")
    if kind in OTHER_KINDS:
        reading.take("peft_type", "adapter.kind", OTHER_KINDS[kind])
        if (tokens := reading.whole("num_virtual_tokens")) is not None:
            reading.take("num_virtual_tokens", "adapter.tokens", tokens)
        read_encoder(reading, OTHER_KINDS[kind])
        reading.idle([*IDLE, *OF_THE_MODEL])
        reading.finish()
        return
    if kind != "LORA":
        reading.leave("peft_type", BOTH, "another kind of adapter; predicted as LoRA")
    read_lora(reading)


def read_encoder(reading: Reading, kind: str) -> None:
    """Read the layers that produce virtual tokens while they train."""
    if kind == "prompt":
        return
    field = "adapter.reparametrization"
    if kind == "prefix" and reading.flag("prefix_projection"):
        reading.take("prefix_projection", field, "mlp")
    elif kind == "p-tuning":
        name = "encoder_reparameterization_type"
        # PEFT writes the word, and older versions the name of its enumeration.
        reading.take(name, field, reading.text(name, "MLP").rpartition(".")[2].lower())
    else:
        reading.idle(["prefix_projection", "encoder_hidden_size"])
        return
    if (hidden := reading.whole("encoder_hidden_size")) is not None:
        reading.take("encoder_hidden_size", "adapter.encoder_hidden_size", hidden)
    reading.leave("encoder_dropout", ("numbers",), "dropout between the layers of an LSTM", off=(0.0,))
    if reading.text("encoder_reparameterization_type", "MLP").upper().endswith("LSTM"):
        reading.leave("encoder_num_layers", BOTH, "predicted with an LSTM of two layers", off=(2,))
    else:
        reading.idle(["encoder_num_layers"])  # PEFT ignores it.


def read_lora(reading: Reading) -> None:
    """Read the fields of a LoraConfig."""
    take_lora(reading, rank="r", alpha="lora_alpha", dropout="lora_dropout", default_rank=8, default_alpha=8)
    if not take_targets(reading, "target_modules", every=("all-linear",)):
        reading.draft.know("targets", None, reading.full("target_modules"), is_stated=False)
    take_adapter_variants(reading)
    if reading.word("bias", "none") != "none":
        reading.leave("bias", BOTH, "biases that train")
    leave_all(reading, WITHOUT)
    reading.idle([*IDLE, "bias"])
    reading.finish()


IMPORTER = Importer(
    name="peft",
    title="PEFT's adapter_config.json",
    marks=frozenset("peft_type r lora_alpha target_modules base_model_name_or_path inference_mode".split()),
    read=read,
    order=15,
    alone=False,
)
