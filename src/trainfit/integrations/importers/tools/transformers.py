"""transformers' TrainingArguments and TRL's configs: JSON, YAML, or the keyword arguments in a script.

A script's LoraConfig, BitsAndBytesConfig and ``from_pretrained`` are read with them.
"""

from collections.abc import Mapping
from typing import Any

from trainfit.integrations.importers.base import Importer, Reading
from trainfit.integrations.importers.calls import Call, NotLiteral
from trainfit.integrations.importers.references import inline, refer
from trainfit.integrations.importers.tools.peft import read_lora
from trainfit.integrations.importers.trainer_fields import (
    BOTH,
    GENERATE,
    IDLE,
    LEARNING_RATES,
    LENGTHS,
    PAIRS,
    TRAINER,
    TRAINERS_OF_TRL,
    TRL,
    WITHOUT,
)
from trainfit.integrations.importers.vocabulary import (
    dtype,
    leave_all,
    read_fsdp,
    take_adapter_variants,
    take_attention,
    take_bitsandbytes,
    take_lora,
    take_optimizer,
    take_pair_loss,
    take_recompute,
    take_targets,
)
from trainfit.spec.errors import InputError

REFERENCE = "the reference model's weights and forward are not predicted (none with an adapter)"
GENERATION = "sampling and rewards are not predicted: the update alone is"


def read(reading: Reading) -> None:
    """Read a file's values, or the calls of a script."""
    if not reading.source.path.split(" [")[0].endswith(".py"):
        _arguments(reading, _kind_of(reading))
        _model_fields(reading)
        reading.finish()
        return
    call = _one_call(reading)
    name = call.name.rpartition(".")[2]
    arguments = Reading(reading.source, reading.draft, call.values, f"{name}.")
    _arguments(arguments, name)
    _model_fields(arguments)
    arguments.finish()
    _other_calls(reading)


def _one_call(reading: Reading) -> Call:
    """Return the script's call of TrainingArguments or of a config of TRL.

    Raises:
        InputError: none, or several of which none is named by its line.
    """
    source = reading.source
    calls = [one for one in source.calls if one.name.rpartition(".")[2] in (*TRAINER, *TRL)]
    if source.part.isdecimal():
        calls = [one for one in calls if one.line == int(source.part)]
    if len(calls) == 1:
        return calls[0]
    if not calls:
        problem = f"no call of {', '.join(TRAINER[:1] + TRL[:2])}, ... with keyword arguments"
        raise InputError(problem, "name a script that has one, or trace the script", file=source.path)
    lines = ", ".join(f"{source.path}:{one.line}" for one in calls[:8])
    remedy = f"name one: {lines}"
    raise InputError(f"{len(calls)} calls of training arguments", remedy, file=source.path)


def _kind_of(reading: Reading) -> str:
    """Return the class that a file's fields are of."""
    if reading.has("num_generations") or reading.has("max_completion_length"):
        return "GRPOConfig"
    if reading.has("beta") or reading.has("max_prompt_length"):
        return "DPOConfig"
    of_trl = (
        "max_seq_length max_length packing use_peft dataset_name dataset_mixture dataset_mixer "
        "dataset_splits dataset_configs hub_model_revision"
    ).split()
    return "SFTConfig" if any(reading.has(name) for name in of_trl) else "TrainingArguments"


def _arguments(reading: Reading, kind: str) -> None:
    """Read the fields of TrainingArguments, and of TRL's configs, whose defaults differ."""
    is_trl = kind in TRL
    _batch(reading, kind)
    if kind == "DPOConfig":
        _preference(reading)
    rate = LEARNING_RATES.get(kind, 2e-5) if is_trl else 5e-5
    read_trainer(reading, lr=rate, recompute=is_trl, autocast=is_trl)
    if is_trl:
        reading.draft.know("weights", "fp32", reading.full("dtype"), is_stated=False)
    if kind in PAIRS and kind not in ("DPOConfig", "RewardConfig"):
        reading.draft.leave(reading.full("ref_model"), None, BOTH, REFERENCE)
        reading.idle(["beta", "label_pad_token_id", "disable_dropout", "sync_ref_model", "reference_free"])
    if kind in GENERATE:
        reading.draft.leave(reading.full("num_generations"), reading.raw("num_generations"), BOTH, GENERATION)
        reading.accounted("num_generations")
        for name in [
            name for name in reading.values if name.startswith(("vllm_", "generation_", "use_vllm"))
        ]:
            reading.leave(name, BOTH, GENERATION)
        reading.idle(
            """beta temperature top_p top_k min_p epsilon reward_weights reward_funcs scale_rewards
                        num_iterations log_completions mask_truncated_completions""".split()
        )


def _preference(reading: Reading) -> None:
    """Read the loss of pairs and its reference."""
    reading.draft.assume("", "objective.name", "dpo", "of DPOConfig")
    take_pair_loss(reading, loss="loss_type", beta="beta", label_smoothing="label_smoothing")
    if reading.flag("reference_free", False):
        reading.take("reference_free", "objective.reference", "none")
    note = "the reference's forward is part of each predicted step"
    reading.leave("precompute_ref_log_probs", BOTH, note)
    reading.idle(["label_pad_token_id", "disable_dropout", "sync_ref_model", "reference_free"])


def _batch(reading: Reading, kind: str) -> None:
    name = reading.first("per_device_train_batch_size", "per_gpu_train_batch_size")
    micro = reading.whole(name, 8)
    pairs = kind in PAIRS and kind != "DPOConfig"  # Whose recipe counts pairs
    note = "a pair is two sequences" if pairs else ""
    reading.take_or_assume(name, "batch.micro", micro * (2 if pairs else 1), note, note)
    accumulate = reading.whole("gradient_accumulation_steps", 1)
    reading.take_or_assume("gradient_accumulation_steps", "batch.accumulate", accumulate)
    length = reading.first("max_length", "max_seq_length", "model_max_length", "block_size")
    if kind in GENERATE and kind not in LENGTHS:
        prompt, answer = reading.whole("max_prompt_length", 512), reading.whole("max_completion_length", 512)
        reading.take_or_assume("max_completion_length", "batch.seq", prompt + answer, "with the prompt")
        reading.accounted("max_prompt_length")
    elif reading.has(length):
        note = "" if reading.flag("packing", False) else "the most; shorter samples take less"
        reading.take(length, "batch.seq", reading.whole(length, at_least=2), note)
    elif kind in TRL:
        longest = LENGTHS.get(kind, 1024)
        reading.draft.assume(
            reading.full(length), "batch.seq", longest, "the most; shorter samples take less"
        )
    else:
        reading.draft.assume("", "batch.seq", 1024, "no file states a length; --seq")
    if kind == "SFTConfig":
        reading.take_or_assume("packing", "data.pack", bool(reading.flag("packing", False)))
    reading.idle(["packing"])


def read_trainer(
    reading: Reading,
    *,
    lr: float,
    optimizer: str = "optim",
    recompute: bool | None,
    autocast: bool | None = False,
) -> None:
    """Read what every tool over transformers' Trainer has; the batch, the model and the adapter aside.

    Args:
        lr: default of the learning rate.
        optimizer: field with the optimizer's name.
        recompute: default of gradient_checkpointing; None: the caller reads it.
        autocast: whether autocast to bf16 is the default; None: the caller reads the precision.
    """
    take_optimizer(reading, optimizer, "adamw_torch_fused")
    if reading.word(optimizer) == "adafactor":
        reading.draft.assume("", "optimizer.scale_parameter", False, "the Trainer's rule")
    reading.take_or_assume("learning_rate", "optimizer.lr", _positive(reading, "learning_rate", lr))
    reading.take_or_assume("weight_decay", "optimizer.weight_decay", reading.number("weight_decay", 0.0))
    if reading.number("weight_decay", 0.0) > 0:
        reading.draft.assume("", "optimizer.no_decay", ["norms", "biases"], "the Trainer's rule")
    norm = reading.number("max_grad_norm", 1.0)
    if norm > 0:
        reading.take_or_assume("max_grad_norm", "optimizer.clip_norm", norm)
    reading.idle(["max_grad_norm"])
    if reading.number("label_smoothing_factor", 0) > 0:
        value = reading.number("label_smoothing_factor")
        reading.take("label_smoothing_factor", "loss_terms.label_smoothing", value)
    if recompute is not None:
        name = reading.first("gradient_checkpointing", "activation_checkpointing")
        take_recompute(reading, name, default=recompute)
    if autocast is not None:
        _precision(reading, default=autocast)
    _compile(reading)
    if reading.flag("use_liger_kernel"):
        if reading.draft.value("objective.name") is None:  # The loss of pairs never holds all logits.
            reading.take("use_liger_kernel", "loss", "fused", "Liger's fused linear cross-entropy")
        reading.draft.set("block_kernels", "triton")
    if reading.is_open("activation_offloading") and reading.flag("activation_offloading"):
        reading.take("activation_offloading", "offload.activations", True)
    if reading.whole("torch_empty_cache_steps") is not None:
        reading.take("torch_empty_cache_steps", "empty_cache_every", reading.whole("torch_empty_cache_steps"))
    workers = reading.whole("dataloader_num_workers", 0, at_least=0)
    if workers:
        reading.take("dataloader_num_workers", "loader.workers", workers)
    if reading.has("dataloader_prefetch_factor"):
        reading.take(
            "dataloader_prefetch_factor", "loader.prefetch", reading.whole("dataloader_prefetch_factor")
        )
    if reading.flag("dataloader_pin_memory") is False:
        reading.take("dataloader_pin_memory", "loader.pin_memory", False)
    if (seed := reading.whole("seed", at_least=0)) is not None:
        reading.take("seed", "seed", seed)
    if reading.has("ddp_bucket_cap_mb"):
        reading.take("ddp_bucket_cap_mb", "parallel.bucket_mb", reading.number("ddp_bucket_cap_mb"))
    _sharding(reading)
    reading.idle(
        """dataloader_num_workers dataloader_pin_memory label_smoothing_factor use_liger_kernel
                    activation_offloading""".split()
    )
    leave_all(reading, WITHOUT)
    reading.idle(IDLE)


def _positive(reading: Reading, name: str, default: float) -> float:
    value = reading.number(name, default)
    if value <= 0:
        raise reading.error(name, "a number above 0", "correct it")
    return float(value)


def _precision(reading: Reading, *, default: bool) -> None:
    """Note autocast: bf16 or fp16; ``auto`` is bf16, as on GPUs that have it."""
    for name in ("bf16", "fp16"):
        word = reading.word(name)
        if word is None:
            continue
        if word in ("auto", "full") or reading.flag(name):
            reading.know("compute", name, name)
        else:
            reading.idle([name])
    if not reading.has("bf16") and not reading.has("fp16") and default:
        reading.draft.know("compute", "bf16", reading.full("bf16"), True, is_stated=False)


def _compile(reading: Reading) -> None:
    if reading.flag("torch_compile"):
        reading.take("torch_compile", "compile", "model", "the model compiled whole")
    elif reading.has("torch_compile_mode"):
        reading.take("torch_compile_mode", "compile", "model", "the model compiled whole")
    mode = reading.word("torch_compile_mode", "default")
    if mode not in ("default", "none"):
        reading.draft.leave(reading.full("torch_compile_mode"), mode, BOTH, "compiled in the default mode")
    reading.idle(["torch_compile", "torch_compile_mode"])


def _sharding(reading: Reading) -> None:
    """Note FSDP or DeepSpeed; several GPUs without them are data parallel (DDP)."""
    deepspeed = reading.raw("deepspeed")
    if isinstance(deepspeed, Mapping):
        inline(reading, "deepspeed", dict(deepspeed), "deepspeed")
    elif deepspeed is not None:
        refer(reading, "deepspeed", reading.text("deepspeed"), "deepspeed")
    fsdp = reading.raw("fsdp")
    if isinstance(fsdp, bool):
        words = ["full_shard"] if fsdp else []
    else:
        listed = reading.texts("fsdp", [])
        words = [part for one in listed for part in str(one).split()]
    kinds = {
        "full_shard": "fsdp",
        "shard_grad_op": "fsdp",
        "hybrid_shard": "hsdp",
        "hybrid_shard_zero2": "hsdp",
        "no_shard": "ddp",
    }
    for word in words:
        if word in kinds:
            reading.know("sharding", kinds[word], "fsdp")
            if word in ("shard_grad_op", "hybrid_shard_zero2"):
                reading.draft.know("reshard", False, reading.full("fsdp"), fsdp)
        elif word == "offload":
            reading.draft.know("offload_params", True, reading.full("fsdp"), fsdp)
        elif word != "auto_wrap":
            raise reading.error("fsdp", f"of {', '.join((*kinds, 'offload', 'auto_wrap'))}", "correct it")
    reading.accounted("fsdp")
    config = reading.raw("fsdp_config")
    if isinstance(config, str):
        reading.leave("fsdp_config", BOTH, "a further file; name its content here")
    elif config is not None:
        inner = reading.inside("fsdp_config")
        if words or reading.draft.fact("sharding") is None:
            reading.draft.know(
                "sharding", "fsdp", inner.full("*"), is_stated=bool(inner.values) and not words
            )
        read_fsdp(inner)
    if reading.draft.fact("sharding") in ("fsdp", "hsdp"):
        reading.draft.know("upcasts", True, "", is_stated=False)
    reading.draft.know("sharding", "ddp", "", is_stated=False)


def _model_fields(reading: Reading) -> None:
    """Read the fields of TRL's ModelConfig: the model, its dtype, attention, LoRA and bitsandbytes."""
    name = reading.first("model_name_or_path", "model_id", "base_model_name_or_path", "model")
    if reading.has(name):
        reading.know("model", reading.text(name), name)
    kind = reading.first("dtype", "torch_dtype")
    if (found := dtype(reading, kind)) is not None:
        reading.know("weights", found, kind)
    take_attention(reading, "attn_implementation")
    if reading.flag("use_flash_attention_2"):
        reading.take("use_flash_attention_2", "attention", "flash")
    reading.idle(["use_flash_attention_2"])
    uses = reading.flag("use_peft", reading.has("lora_r"))
    if uses:
        take_lora(
            reading,
            rank="lora_r",
            alpha="lora_alpha",
            dropout="lora_dropout",
            default_rank=16,
            default_alpha=32,
        )
        if not take_targets(reading, "lora_target_modules"):
            reading.draft.know("targets", None, reading.full("lora_target_modules"), is_stated=False)
        take_adapter_variants(reading, saved="lora_modules_to_save")
    reading.idle(
        ["use_peft", *(["lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"] if not uses else [])]
    )
    take_bitsandbytes(
        reading,
        in_4bit=bool(reading.flag("load_in_4bit")),
        in_8bit=bool(reading.flag("load_in_8bit")),
        kind="bnb_4bit_quant_type",
        double=reading.first("use_bnb_nested_quant", "bnb_4bit_use_double_quant"),
        compute="bnb_4bit_compute_dtype",
        by="load_in_4bit" if reading.flag("load_in_4bit") else "load_in_8bit",
    )
    reading.idle(["load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"])


def _other_calls(reading: Reading) -> None:
    """Read a script's LoraConfig, BitsAndBytesConfig, and the loading of its model."""
    for one in reading.source.calls:
        last = one.name.rpartition(".")[2]
        is_model = any(part in one.name for part in ("Model", "LM", "GPT", "Llama"))
        reader = {
            "LoraConfig": read_lora,
            "BitsAndBytesConfig": _bitsandbytes,
            "get_peft_model": _unsloth_adapter if "r" in one.values else None,
            "from_pretrained": _unsloth_model if "Fast" in one.name else _pretrained if is_model else None,
            "from_config": _from_config if is_model else None,
        }.get(last)
        if reader is not None:
            reader(Reading(reading.source, reading.draft, one.values, f"{last}."))
        elif last in ("Trainer", "Seq2SeqTrainer", *TRAINERS_OF_TRL) and isinstance(
            one.values.get("model"), str
        ):
            reading.draft.know("model", one.values["model"], f"{last}.model", one.values["model"])


def _unsloth_adapter(reading: Reading) -> None:
    """Read Unsloth's ``FastLanguageModel.get_peft_model``: a LoraConfig, and recomputation."""
    word = reading.word("use_gradient_checkpointing", "false")
    if word not in ("false", "none"):
        reading.draft.facts.pop("recompute", None)  # In place of the Trainer's
        reading.know("recompute", True, "use_gradient_checkpointing")
    if word == "unsloth":
        name = reading.full("use_gradient_checkpointing")
        reading.draft.take(name, word, "offload.activations", True, "inputs of blocks on the host")
    reading.draft.leave(
        reading.full("FastLanguageModel"), None, BOTH, "Unsloth's kernels keep fewer activations"
    )
    reading.idle(["random_state", "use_gradient_checkpointing", "max_seq_length"])
    read_lora(reading)


def _bitsandbytes(reading: Reading) -> None:
    in_4bit, in_8bit = bool(reading.flag("load_in_4bit")), bool(reading.flag("load_in_8bit"))
    take_bitsandbytes(
        reading,
        in_4bit=in_4bit,
        in_8bit=in_8bit,
        kind="bnb_4bit_quant_type",
        double="bnb_4bit_use_double_quant",
        compute="bnb_4bit_compute_dtype",
        default_kind="fp4",
        default_compute=_default_compute(reading),
        skipped="llm_int8_skip_modules",
        by="load_in_4bit" if in_4bit else "load_in_8bit",
    )
    leave_all(reading, {"bnb_4bit_quant_storage": WITHOUT["bnb_4bit_quant_storage"]})
    reading.idle(
        """load_in_4bit load_in_8bit llm_int8_threshold llm_int8_skip_modules
                    llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight""".split()
    )
    reading.finish()


def _default_compute(reading: Reading) -> str | None:
    """Return the dtype of products by default: fp32, and under autocast that of autocast."""
    return None if reading.draft.fact("compute") in ("bf16", "fp16") else "fp32"


def _pretrained(reading: Reading) -> None:
    """Read ``from_pretrained``; 4 bits are fp4 by transformers' default."""
    if reading.flag("load_in_4bit"):
        compute = _default_compute(reading)
        take_bitsandbytes(
            reading,
            in_4bit=True,
            in_8bit=False,
            default_kind="fp4",
            default_compute=compute,
            by="load_in_4bit",
        )
    _loading(reading)


def _unsloth_model(reading: Reading) -> None:
    """Read Unsloth's ``FastLanguageModel.from_pretrained``, which states the length of sequences, too."""
    if reading.flag("load_in_4bit", True):
        if reading.has("load_in_4bit"):
            take_bitsandbytes(reading, in_4bit=True, in_8bit=False, default_double=True, by="load_in_4bit")
        else:
            value = {"kind": "nf4", "library": "bitsandbytes"}
            reading.draft.assume(reading.full("load_in_4bit"), "quantize", value, "Unsloth's default")
    if reading.has("max_seq_length"):
        reading.draft.forget("batch.seq")
        reading.take("max_seq_length", "batch.seq", reading.whole("max_seq_length", at_least=2))
    _loading(reading)


def _from_config(reading: Reading) -> None:
    """Read ``from_config``: the model starts from random weights."""
    reading.draft.know("starts_random", True, "", is_stated=False)
    _loading(reading)


def _loading(reading: Reading) -> None:
    """Read the loading of a model: its name, dtype and attention."""
    named = reading.first("pretrained_model_name_or_path", "model_name")
    first: Any = reading.positional[0] if reading.positional else reading.raw(named)
    if isinstance(first, str):
        reading.draft.know("model", first, reading.full("name"), first)
    elif isinstance(first, NotLiteral):
        note = "the model's name is only known when the script runs"
        reading.draft.suppose(reading.full("name"), first.text, note)
    kind = reading.first("dtype", "torch_dtype")
    if (found := dtype(reading, kind)) is not None:
        reading.know("weights", found, kind)
    else:
        reading.draft.facts.pop("weights", None)  # Not TRL, but transformers loads the model.
    take_attention(reading, "attn_implementation")
    reading.idle(["pretrained_model_name_or_path", "quantization_config", "config", "load_in_4bit", *IDLE])
    reading.finish()


IMPORTER = Importer(
    name="transformers",
    title="transformers' TrainingArguments or a config of TRL",
    marks=frozenset(
        (
            *TRAINER,
            *TRL,
            *"""
        per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing num_train_epochs
        lr_scheduler_type per_device_eval_batch_size model_name_or_path optim learning_rate use_peft
        max_seq_length logging_steps max_steps warmup_steps deepspeed fsdp output_dir
""".split(),
        )
    ),
    read=read,
)
