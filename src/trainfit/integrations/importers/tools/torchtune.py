"""torchtune's YAML: components by dotted names. Weights, gradients and states are all in ``dtype``."""

import re
from collections.abc import Mapping
from typing import Any

from trainfit.integrations.importers import models
from trainfit.integrations.importers.base import Importer, Reading
from trainfit.integrations.importers.vocabulary import dtype, leave_all, take_optimizer, take_pair_loss
from trainfit.spec.imported import Change

COMPONENT = "_component_"
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
MAX_REFERENCES = 16
BUILDER = re.compile(r"^(?:(?P<kind>lora|qlora|dora|qdora)_)?(?P<model>\w+?)(?:_(?:instruct|base))?$")
ATTENTION_MODULES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
MLP = ["down_proj", "gate_proj", "up_proj"]
CHUNKED = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss")
DPO = {"DPOLoss": "sigmoid", "RSOLoss": "hinge"}
"""The recipe's loss of pairs by class."""
OTHER_PAIRS = ("SimPOLoss",)
IDLE = """
output_dir checkpointer resume_from_checkpoint save_adapter_weights_only dataset dataset_val seed shuffle
epochs max_steps_per_epoch lr_scheduler metric_logger log_every_n_steps log_peak_memory_stats log_level
device profiler run_val_every_n_steps save_every_n_steps save_every_n_epochs collate_fn tensor_parallel_plan
name base_model_path use_distributed_state_dict keep_last_n_checkpoints enable_async_checkpointing
save_last_epoch_only low_cpu_ram dataloader_seed datasets prompt_template debug_logging_enabled
""".split()
BOTH: tuple[Change, ...] = ("memory", "time")
WITHOUT: dict[str, tuple[tuple[Change, ...], str]] = {
    "batch_size_val": (("memory",), "evaluation with larger batches than training may set the peak"),
    "quantizer": (("time", "numbers"), "fake quantisation in training"),
    "custom_sharded_layers": (("memory",), "embedding and output layer in units of their own"),
    "memory_efficient_fsdp_wrap": (("memory",), "embedding and output layer in units of their own"),
    "teacher_model": (BOTH, "the teacher's weights and forward are not predicted"),
    "teacher_checkpointer": (("memory",), "the teacher's weights"),
    "kd_loss": (BOTH, "a second loss"),
    "kd_ratio": (("numbers",), "share of the second loss"),
    "ref_checkpointer": (BOTH, "the reference model's weights and forward are not predicted"),
    "fsdp": (BOTH, "set offload.weights"),
    "ac_mode": (BOTH, "set recompute"),
    "enable_fp8_training": (("time",), "8-bit products; predicted in bf16"),
    "fp8_recipe_name": (("time",), "8-bit products; predicted in bf16"),
    "grpo_samples": (BOTH, "sampling is not predicted"),
    "max_generated_tokens": (BOTH, "sampling is not predicted"),
    "reward_and_value_model": (BOTH, "sampling, the value and the reward model are not predicted"),
    "enable_kv_cache": (BOTH, "sampling is not predicted"),
    "ppo_epochs": (("time",), "updates of a batch"),
    "num_steps": (("time",), "updates"),
    "forward_batch_size": (BOTH, "sampling is not predicted"),
    "expert_parallel_dim": (BOTH, "set parallel.expert"),
    "use_grouped_mm": (("time",), "kernels of the experts"),
}


def read(reading: Reading) -> None:
    """Read a torchtune config."""
    reading.values = {name: _resolved(value, reading.values) for name, value in reading.values.items()}
    reading.draft.know("starts_random", True, "", is_stated=False)  # Its checkpoints are paths of a machine.
    _model(reading)
    _batch(reading)
    found = dtype(reading, "dtype") or "bf16"
    reading.know("weights", found, "dtype")
    _optimizer(reading)
    _loss(reading)
    _memory(reading)
    _parallel(reading)
    if reading.has("clip_grad_norm"):
        reading.take("clip_grad_norm", "optimizer.clip_norm", reading.number("clip_grad_norm"))
    compiled = reading.raw("compile")
    if isinstance(compiled, Mapping):
        inner = reading.inside("compile")
        if inner.flag("model"):
            inner.take("model", "compile", "block")
        inner.idle(inner.values)
    elif reading.flag("compile"):
        reading.take("compile", "compile", "block", "block by block")
    reading.idle(["compile"])
    leave_all(reading, WITHOUT)
    reading.idle(IDLE)
    reading.finish()


def _resolved(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a value with ``${name}`` replaced by what the name stands for."""
    for _ in range(MAX_REFERENCES):
        found = REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            return value
        value = values
        for part in found[1].split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _model(reading: Reading) -> None:
    """Set the model and its adapter from the builder: ``torchtune.models.llama3_2.lora_llama3_2_1b``."""
    name = "model" if reading.has("model") else reading.first("model", "policy_model")
    inner = reading.inside(name)
    builder = inner.text(COMPONENT, "")
    found = BUILDER.fullmatch(builder.rpartition(".")[2])
    kind, model = (found["kind"], found["model"]) if found else (None, builder)
    known = models.by_letters(model)
    inner.know("model", known or model, COMPONENT)
    if kind:
        _adapter(inner, kind)
    for trained in ("decoder_trainable", "encoder_trainable", "fusion_trainable"):
        inner.leave(trained, BOTH, "parts of a multimodal model; the text model alone is predicted")
    inner.idle(["max_seq_len", "attn_dropout", "image_size", "quantize_base", "use_dora"])
    inner.finish()
    tokenizer = reading.inside("tokenizer")
    if tokenizer.has("max_seq_len"):
        length = tokenizer.whole("max_seq_len", at_least=2)
        tokenizer.take("max_seq_len", "batch.seq", length, "the most; shorter samples take less")
    tokenizer.idle(tokenizer.values)
    reading.draft.assume(tokenizer.full("max_seq_len"), "batch.seq", 1024, "no file states a length; --seq")


def _adapter(inner: Reading, kind: str) -> None:
    modules: list[str] = inner.texts("lora_attn_modules", ["q_proj", "v_proj"])
    targets: list[str] = [ATTENTION_MODULES.get(one, one) for one in modules]
    targets += MLP if inner.flag("apply_lora_to_mlp", False) else []
    targets += ["lm_head"] if inner.flag("apply_lora_to_output", False) else []
    inner.draft.set("adapter.kind", "lora")
    inner.take_or_assume("lora_attn_modules", "adapter.targets", sorted(targets))
    inner.take_or_assume("lora_rank", "adapter.rank", inner.whole("lora_rank", 8))
    inner.take_or_assume("lora_alpha", "adapter.alpha", inner.whole("lora_alpha", 16))
    if inner.number("lora_dropout"):
        inner.take("lora_dropout", "adapter.dropout", inner.number("lora_dropout"))
    inner.draft.set("adapter.dtype", "base")
    if kind.startswith("q") or inner.flag("quantize_base", False):
        name = "quantize_base" if inner.has("quantize_base") else COMPONENT
        value = {"kind": "nf4", "library": "torchao"}
        inner.draft.take(inner.full(name), inner.raw(name), "quantize", value)
    if "dora" in kind or inner.flag("use_dora", False):
        inner.draft.take(inner.full(COMPONENT), inner.raw(COMPONENT), "adapter.dora", True)
    inner.idle(["apply_lora_to_mlp", "apply_lora_to_output", "lora_dropout"])


def _batch(reading: Reading) -> None:
    loss = str(reading.inside("loss").text(COMPONENT, "")).rpartition(".")[2]
    pairs = 2 if loss in OTHER_PAIRS else 1
    note = "a pair is two sequences" if pairs == 2 else ""
    reading.take_or_assume("batch_size", "batch.micro", reading.whole("batch_size", 1) * pairs, note)
    name = "gradient_accumulation_steps"
    reading.take_or_assume(name, "batch.accumulate", reading.whole(name, 1))


def _optimizer(reading: Reading) -> None:
    inner = reading.inside("optimizer")
    component = inner.text(COMPONENT, "torch.optim.AdamW")
    library, _, kind = component.rpartition(".")
    words = {
        "AdamW": "adamw_torch",
        "Adam": "adam",
        "SGD": "sgd",
        "Adafactor": "adafactor",
        "AdamW8bit": "adamw_bnb_8bit" if library.startswith("bitsandbytes") else "adamw_torch_8bit",
        "AdamW4bit": "adamw_torch_4bit",
        "PagedAdamW": "paged_adamw_32bit",
        "PagedAdamW8bit": "paged_adamw_8bit",
        "PagedAdamW32bit": "paged_adamw_32bit",
    }
    if inner.has(COMPONENT):
        inner.values[COMPONENT] = words.get(kind, kind)
    take_optimizer(inner, COMPONENT, "adamw_torch")
    if inner.flag("fused"):
        reading.draft.set("optimizer.implementation", "fused")
    lr = inner.number("lr")
    if lr is not None and lr > 0:
        inner.take("lr", "optimizer.lr", lr)
    decay = inner.number("weight_decay", 0.01 if "AdamW" in kind else 0.0)
    inner.take_or_assume("weight_decay", "optimizer.weight_decay", decay)
    inner.idle(["fused", "lr", "betas", "eps", "foreach"])
    inner.finish()
    if reading.flag("optimizer_in_bwd"):
        reading.take("optimizer_in_bwd", "optimizer.in_backward", True)
    reading.idle(["optimizer_in_bwd"])


def _loss(reading: Reading) -> None:
    inner = reading.inside("loss")
    kind = inner.text(COMPONENT, "").rpartition(".")[2]
    if kind in CHUNKED:
        inner.take(COMPONENT, "loss", "chunked")
    elif kind in DPO:
        inner.take(COMPONENT, "objective.name", "dpo")
        reading.draft.set("objective.loss", DPO[kind])
        take_pair_loss(inner, loss="", beta=inner.first("beta", "gamma"), label_smoothing="label_smoothing")
        reading.idle(["ref_checkpointer"])
    elif kind and kind != "CrossEntropyLoss":
        inner.leave(COMPONENT, BOTH, "another objective: reference models and sampling are not predicted")
    inner.idle(inner.values)


def _memory(reading: Reading) -> None:
    reading.know(
        "recompute",
        bool(reading.flag("enable_activation_checkpointing", False)),
        "enable_activation_checkpointing",
    )
    if reading.word("ac_mode") == "selective" and not reading.flag("enable_activation_checkpointing", False):
        option = reading.raw("ac_option")
        if isinstance(option, int) and not isinstance(option, bool) and option > 0:
            reading.draft.facts.pop("recompute", None)
            reading.take("ac_option", "recompute", {"every": option})
            reading.accounted("ac_mode")
            reading.idle(["ac_mode"])
    reading.idle(["ac_option"])
    if reading.flag("enable_activation_offloading"):
        reading.take("enable_activation_offloading", "offload.activations", True)
    if reading.flag("fsdp_cpu_offload"):
        reading.know("offload_params", True, "fsdp_cpu_offload")
    reading.idle(["enable_activation_offloading", "fsdp_cpu_offload"])


def _parallel(reading: Reading) -> None:
    for name, field in (
        ("tensor_parallel_dim", "parallel.tensor"),
        ("context_parallel_dim", "parallel.context"),
        ("data_parallel_shard_dim", "parallel.shard"),
        ("data_parallel_replicate_dim", "parallel.replicate"),
    ):
        size = reading.whole(name, at_least=-1)
        if size is not None and size > 1:
            reading.take(name, field, size)
        reading.idle([name])
    reading.draft.know("sharding", "fsdp", "", is_stated=False)
    if (keeps := reading.flag("fsdp_reshard_after_forward")) is not None:
        reading.know("reshard", keeps, "fsdp_reshard_after_forward")


IMPORTER = Importer(
    name="torchtune",
    title="a torchtune config",
    marks=frozenset(
        """
        model._component_ tokenizer._component_ dataset._component_ checkpointer._component_
        loss._component_ optimizer._component_ metric_logger._component_ enable_activation_checkpointing
        log_peak_memory_stats enable_activation_offloading optimizer_in_bwd policy_model._component_
""".split()
    ),
    read=read,
)
