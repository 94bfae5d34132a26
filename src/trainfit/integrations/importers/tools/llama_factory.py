"""LLaMA-Factory's YAML or JSON. Its defaults: 2,048 tokens, LoRA of rank 8 on all linear layers."""

from trainfit.integrations.importers.base import Importer, Reading
from trainfit.integrations.importers.tools.transformers import read_trainer
from trainfit.integrations.importers.vocabulary import (
    PAIR_LOSSES,
    leave_all,
    take_adapter_variants,
    take_attention,
    take_bitsandbytes,
    take_lora,
    take_pair_loss,
    take_targets,
)
from trainfit.spec.imported import Change

IDLE = """
template dataset dataset_dir media_dir eval_dataset max_samples overwrite_cache preprocessing_num_workers
preprocessing_batch_size val_size plot_loss mix_strategy interleave_probs streaming buffer_size
tokenized_path train_on_prompt mask_history ignore_pad_token_for_loss eval_num_beams eval_on_each_dataset
tool_format default_system enable_thinking preserve_thinking data_shared_file_system image_max_pixels
image_min_pixels video_max_pixels video_min_pixels video_fps video_maxlen image_do_pan_and_scan
crop_to_patches use_audio_in_video audio_sampling_rate adapter_name_or_path adapter_folder
new_special_tokens add_tokens add_special_tokens new_special_tokens_config init_special_tokens
split_special_tokens hf_hub_token ms_hub_token om_hub_token infer_backend infer_dtype use_kv_cache
offload_folder print_param_status compute_accuracy disable_shuffling early_stopping_steps
include_effective_tokens_per_second export_dir export_size export_device export_quantization_bit
export_quantization_dataset export_legacy_format export_hub_model_id create_new_adapter pref_beta pref_ftx
pref_loss dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma ld_alpha use_reentrant_gc
train_from_scratch predict_with_generate use_swanlab quantization_type double_quantization
quantization_method quantization_device_map pissa_iter pissa_convert packing neat_packing ray_init_kwargs
ray_run_name ray_storage_path ray_num_workers resources_per_worker placement_strategy master_addr
master_port loraplus_lr_embedding use_dft_loss upcast_lmhead_output fp8_backend freeze_vision_tower
freeze_multi_modal_projector enable_torch_profiler asft_alpha eaft_alpha
""".split()
BOTH: tuple[Change, ...] = ("memory", "time")
OTHER_OPTIMIZER = "predicted as AdamW with two moments a weight"
OTHER_LOSS = "another loss; its extra forwards are not predicted"
WITHOUT: dict[str, tuple[tuple[Change, ...], str]] = {
    "use_galore": (BOTH, OTHER_OPTIMIZER),
    "use_apollo": (BOTH, OTHER_OPTIMIZER),
    "use_badam": (BOTH, "some layers train at a time; predicted with all"),
    "use_adam_mini": (("memory",), OTHER_OPTIMIZER),
    "use_llama_pro": (BOTH, "new layers alone train"),
    "use_muon": (BOTH, "set optimizer.name: muon"),
    "pissa_init": (("numbers",), "how the adapter begins"),
    "loraplus_lr_ratio": (("numbers",), "another learning rate of half the adapter"),
    "shift_attn": (("time", "numbers"), "shifted attention"),
    "mixture_of_depths": (BOTH, "tokens that skip layers"),
    "use_unsloth": (BOTH, "Unsloth's kernels keep fewer activations"),
    "use_unsloth_gc": (BOTH, "inputs of recomputed blocks wait on the host: set offload.activations"),
    "upcast_layernorm": (("memory",), "norms in float32"),
    "rope_scaling": (("numbers",), "scaled positions"),
    "resize_vocab": (("memory",), "rows of the embedding"),
    "moe_aux_loss_coef": (("numbers",), "a term of the loss"),
    "ref_model": (BOTH, "the reference model is not predicted"),
    "reward_model": (BOTH, "a reward model is not predicted"),
    "ref_model_quantization_bit": (("memory",), "the reference model is not predicted"),
    "reward_model_type": (BOTH, "a reward model is not predicted"),
    "use_asft_loss": (BOTH, OTHER_LOSS),
    "use_eaft_loss": (("numbers",), OTHER_LOSS),
    "use_mca": (BOTH, "Megatron's engine is not predicted"),
    "use_megatron_bridge": (BOTH, "Megatron's engine is not predicted"),
    "use_hyper_parallel": (BOTH, "another engine"),
    "use_kt": (BOTH, "experts that compute on the CPU"),
    "freeze_extra_modules": (BOTH, "more modules that train"),
    "freeze_language_model": (BOTH, "the text model is frozen"),
    "fp8_enable_fsdp_float8_all_gather": (("time",), "weights gathered in 8 bits"),
    "block_diag_attn": (("time", "numbers"), "packed sequences do not see each other"),
    "oft_target": (BOTH, "orthogonal adapters; predicted as training of every weight"),
    "oft_block_size": (BOTH, "orthogonal adapters; predicted as training of every weight"),
    "oft_rank": (BOTH, "orthogonal adapters; predicted as training of every weight"),
    "tensor_model_parallel_size": (BOTH, "set parallel.tensor"),
    "pipeline_model_parallel_size": (BOTH, "set parallel.pipeline"),
    "expert_model_parallel_size": (BOTH, "set parallel.expert"),
    "context_parallel_size": (BOTH, "set parallel.context"),
    "use_distributed_optimizer": (BOTH, "Megatron's engine is not predicted"),
    "recompute_granularity": (BOTH, "Megatron's engine is not predicted"),
    "use_v1_kernels": (("time",), "LLaMA-Factory's kernels"),
}
PAIRS = ("dpo", "rm")


def read(reading: Reading) -> None:
    """Read a LLaMA-Factory config."""
    if reading.has("model_name_or_path"):
        reading.know("model", reading.text("model_name_or_path"), "model_name_or_path")
    if reading.flag("train_from_scratch"):
        reading.know("starts_random", True, "train_from_scratch")
    stage = reading.word("stage", "sft")
    _batch(reading, stage)
    kind = reading.word("finetuning_type", "lora")
    _adapter(reading, kind)
    _stage(reading, stage, kind)
    attention = reading.word("flash_attn", "auto")
    if attention != "auto":
        take_attention(reading, "flash_attn")
    reading.idle(["flash_attn"])
    if reading.flag("enable_liger_kernel"):
        reading.take("enable_liger_kernel", "loss", "fused", "Liger's fused linear cross-entropy")
        reading.draft.set("block_kernels", "triton")
    reading.idle(["enable_liger_kernel"])
    if (off := reading.flag("disable_gradient_checkpointing")) is not None:
        reading.know("recompute", not off, "disable_gradient_checkpointing")
    _dtypes(reading, kind)
    read_trainer(reading, lr=5e-5, recompute=True)
    leave_all(reading, WITHOUT)
    reading.idle(
        IDLE,
        prefixes=("swanlab_", "vllm_", "sglang_", "galore_", "apollo_", "badam_", "profiler_", "kt_", "ppo_"),
    )
    reading.finish()


def _batch(reading: Reading, stage: str) -> None:
    pairs = 2 if stage in PAIRS and not _is_dpo(reading, stage) else 1
    note = "a pair is two sequences" if pairs == 2 else ""
    name = "per_device_train_batch_size"
    reading.take_or_assume(name, "batch.micro", reading.whole(name, 8) * pairs, note, note)
    name = "gradient_accumulation_steps"
    reading.take_or_assume(name, "batch.accumulate", reading.whole(name, 1))
    name = reading.first("cutoff_len", "model_max_length")
    packed = reading.flag("packing", stage == "pt") or reading.flag("neat_packing", False)
    note = "" if packed else "the most; without packing, shorter samples take less"
    if reading.flag("neat_packing"):
        reading.take("neat_packing", "data.pack", "documents")
    else:
        reading.take_or_assume("packing", "data.pack", bool(packed))
    reading.take_or_assume(name, "batch.seq", reading.whole(name, 2048, at_least=2), note, note)


def _adapter(reading: Reading, kind: str) -> None:
    if kind == "lora":
        reading.take_or_assume("finetuning_type", "adapter.kind", "lora")
        rank = reading.whole("lora_rank", 8)
        take_lora(
            reading,
            rank="lora_rank",
            alpha="lora_alpha",
            dropout="lora_dropout",
            default_rank=8,
            default_alpha=2 * rank,
        )
        if not take_targets(reading, "lora_target"):
            reading.draft.assume(reading.full("lora_target"), "adapter.targets", "all-linear")
    elif kind != "full":
        reading.leave("finetuning_type", BOTH, "predicted as training of every weight")
    reading.idle(["finetuning_type"])
    for name in ("freeze_trainable_layers", "freeze_trainable_modules"):
        reading.leave(name, BOTH, "some layers train; predicted with all")
    if kind == "lora":
        take_adapter_variants(reading, saved="additional_target")
    bits = reading.whole("quantization_bit")
    if bits is None:
        return
    method = reading.word("quantization_method", "bnb")
    if method not in ("bnb", "bitsandbytes") or bits not in (4, 8):
        reading.leave("quantization_bit", BOTH, f"{bits} bits by {method}; predicted unquantised")
    elif kind != "lora":
        reading.leave("quantization_bit", BOTH, "a quantised base without an adapter trains nothing")
    else:
        take_bitsandbytes(
            reading,
            in_4bit=bits == 4,
            in_8bit=bits == 8,
            kind="quantization_type",
            double="double_quantization",
            default_double=True,
            by="quantization_bit",
        )


def _is_dpo(reading: Reading, stage: str) -> bool:
    return stage == "dpo" and reading.word("pref_loss", "sigmoid") in PAIR_LOSSES


def _stage(reading: Reading, stage: str, kind: str) -> None:
    changes: tuple[Change, ...] = ("time",) if kind == "lora" else BOTH
    if _is_dpo(reading, stage):
        reading.take("stage", "objective.name", "dpo")
        take_pair_loss(reading, loss="pref_loss", beta="pref_beta", label_smoothing="dpo_label_smoothing")
        reading.leave("pref_ftx", ("numbers",), "a term of the chosen answers' loss")
        reading.leave("ref_model", ("numbers",), "a reference of other weights takes the same memory")
        return
    notes = {
        "dpo": (("time",), "another loss of pairs; predicted as next-token training"),
        "kto": (changes, "the reference model's forward (and weights without an adapter) is not predicted"),
        "rm": (("memory",), "a reward head in place of the output layer"),
        "ppo": (BOTH, "sampling, the value and the reward model are not predicted: the update alone is"),
    }
    if stage in notes:
        reading.leave("stage", *notes[stage])
    reading.idle(["stage"])


def _dtypes(reading: Reading, kind: str) -> None:
    """Note the dtype of the weights: that of the precision, but fp32 for weights that train.

    Not with ``pure_bf16``, nor under FSDP or ZeRO-3, which keep their own fp32 copies.
    """
    half = "bf16" if reading.flag("bf16") else "fp16" if reading.flag("fp16") else None
    if reading.flag("pure_bf16"):
        reading.know("weights", "bf16", "pure_bf16")
    elif kind == "full" and half is not None:
        reading.draft.know(
            "weights", "fp32", reading.full(half), "fp32 for weights that train", is_stated=False
        )
    else:
        reading.draft.know("weights", half or "fp32", reading.full(half or "bf16"), half, is_stated=False)
    reading.idle(["pure_bf16"])
    if reading.flag("fp8"):
        reading.know("compute", "fp8", "fp8")
    reading.idle(["fp8"])


IMPORTER = Importer(
    name="llama-factory",
    title="a LLaMA-Factory config",
    marks=frozenset(
        """
        stage finetuning_type template cutoff_len lora_target lora_rank dataset_dir quantization_bit
        plot_loss preprocessing_num_workers neat_packing pure_bf16 flash_attn enable_liger_kernel pref_loss
""".split()
    ),
    read=read,
    includes=("transformers",),
)
