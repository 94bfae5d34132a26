"""axolotl's YAML. Its defaults: 512 tokens a sequence, one sequence, no recomputation, bf16.

The base is loaded in bf16 (or fp16), so that a full fine-tuning has bf16 weights under autocast.
"""

from trainfit.integrations.importers.base import Importer, Reading
from trainfit.integrations.importers.tools.transformers import read_trainer
from trainfit.integrations.importers.vocabulary import (
    leave_all,
    take_adapter_variants,
    take_attention,
    take_bitsandbytes,
    take_lora,
    take_pair_loss,
    take_recompute,
    take_targets,
)
from trainfit.spec.imported import Change

IDLE = """
model_type tokenizer_type tokenizer_config tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common
tokenizer_save_jinja_files processor_type processor_kwargs base_model_config revision_of_model datasets
test_datasets pretraining_dataset dataset_prepared_path dataset_processes dataset_num_proc dataset_shard_num
dataset_shard_idx dataset_keep_in_memory dataset_exact_deduplication shuffle_merged_datasets
shuffle_before_merging_datasets skip_prepare_dataset push_dataset_to_hub num_dataset_shards_to_save
val_set_size chat_template chat_template_jinja chat_template_kwargs default_system_message special_tokens
tokens added_tokens_overrides eot_tokens train_on_inputs strict num_epochs lr_scheduler lr_quadratic_warmup
cosine_min_lr_ratio cosine_constant_lr_ratio lr_div_factor warmup_ratio evals_per_epoch saves_per_epoch
adam_epsilon adam_epsilon2 adam_beta3 adam_eps early_stopping_patience loss_watchdog_threshold
loss_watchdog_patience eval_table_size eval_max_new_tokens eval_causal_lm_metrics do_causal_lm_eval
do_bench_eval use_wandb use_tensorboard use_mlflow use_comet mlflow_tracking_uri mlflow_experiment_name
hf_mlflow_log_artifacts comet_project_name base_model_ignore_patterns lora_model_dir
auto_resume_from_checkpoints save_first_step local_rank device gc_steps gc_collect_steps profiler_steps
profiler_steps_start hf_use_auth_token is_falcon_derived_model is_llama_derived_model
is_mistral_derived_model is_qwen_derived_model torchdistx_path total_num_tokens total_supervised_tokens
sample_packing_eff_est sample_packing_group_size sample_packing_bin_size sample_packing_sequentially
sample_packing_mp_start_method eval_sample_packing sample_packing_seq_len_multiplier max_packed_sequence_len
pretrain_multipack_buffer_size pretrain_multipack_attn pretraining_sample_concatenation
streaming_multipack_buffer_size curriculum_sampling multipack_real_batches excess_length_strategy
min_sample_len max_prompt_len experimental_skip_move_to_device mean_resizing_embeddings
embeddings_skip_upcast rl_beta dpo_beta orpo_alpha simpo_gamma cpo_alpha kto_desirable_weight
kto_undesirable_weight reinit_weights fsdp_final_state_dict_type ddp_find_unused_parameters ddp project_name
include_tkps generate_samples num_generation_samples lora_fan_in_fan_out gpu_memory_limit max_memory
axolotl_config_path is_preprocess dataloader_drop_last gptq_groupsize gptq_model_v1 float16 bfloat16 float32
flash_attn_cross_entropy wandb_log_model datasets_prepared_path load_from_disk debug noisy_embedding_alpha
use_ray eta_min gptq_disable_exllama full_finetune merge_lora resume_from_checkpoint tf32
unsloth_cross_entropy_loss
""".split()
BOTH: tuple[Change, ...] = ("memory", "time")
APART = "attention crosses the ends of packed samples here: at most as fast as theirs"
KERNELS = "axolotl's LoRA kernels keep fewer activations"
WITHOUT: dict[str, tuple[tuple[Change, ...], str]] = {
    "lora_mlp_kernel": (BOTH, KERNELS),
    "lora_qkv_kernel": (BOTH, KERNELS),
    "lora_o_kernel": (BOTH, KERNELS),
    "lora_embedding_kernel": (BOTH, KERNELS),
    "unsloth_lora_mlp": (BOTH, KERNELS),
    "unsloth_lora_qkv": (BOTH, KERNELS),
    "unsloth_lora_o": (BOTH, KERNELS),
    "use_kernels": (BOTH, KERNELS),
    "eval_batch_size": (("memory",), "evaluation with larger batches than training may set the peak"),
    "eval_sequence_len": (("memory",), "evaluation with longer sequences than training may set the peak"),
    "group_by_length": (("time",), "sequences of like lengths; every sequence has batch.seq tokens"),
    "lora_target_parameters": (BOTH, "expert weights with an adapter"),
    "peft_layers_to_transform": (BOTH, "an adapter on some layers; predicted on all"),
    "unfrozen_parameters": (BOTH, "some weights are frozen; predicted with all trained"),
    "resize_token_embeddings_to_32x": (("memory",), "rows of the embedding up to a multiple of 32"),
    "shrink_embeddings": (("memory",), "fewer rows of the embedding"),
    "neftune_noise_alpha": (("numbers",), "noise on the embeddings"),
    "relora": (BOTH, "restarts of the adapter; one adapter is predicted"),
    "relora_steps": (BOTH, "restarts of the adapter; one adapter is predicted"),
    "relora_cpu_offload": (BOTH, "restarts of the adapter"),
    "gptq": (BOTH, "GPTQ's storage of the base; predicted as it would be without"),
    "qat": (BOTH, "fake quantisation in training"),
    "quantization": (("numbers",), "quantised after training"),
    "fp8_enable_fsdp_float8_all_gather": (("time",), "weights gathered in 8 bits"),
    "tiled_mlp": (BOTH, "the MLP in tiles of the sequence keeps less"),
    "tiled_mlp_num_shards": (BOTH, "the MLP in tiles of the sequence keeps less"),
    "selective_checkpointing": (
        BOTH,
        "recomputes all but some operations; predicted as gradient_checkpointing says",
    ),
    "layer_offloading": (BOTH, "layers wait on the host; set offload.weights"),
    "flash_attn_rms_norm": (("time",), "a fused norm"),
    "flash_attn_fuse_mlp": (("time",), "a fused MLP"),
    "flash_attn_fuse_qkv": (("time",), "a fused projection"),
    "flex_attention": (BOTH, "predicted with torch's own choice (sdpa)"),
    "sage_attention": (BOTH, "predicted with torch's own choice (sdpa)"),
    "flex_attn_compile_kwargs": (("time",), "options of the compiled attention"),
    "quantize_moe_experts": (("memory",), "experts are quantised too"),
    "experts_implementation": (("time",), "kernels of the experts"),
    "use_scattermoe": (("time",), "kernels of the experts"),
    "use_sonicmoe": (("time",), "kernels of the experts"),
    "model_quantization_config": (("memory",), "how the base is stored"),
    "model_quantization_config_kwargs": (("memory",), "how the base is stored"),
    "model_config": (BOTH, "fields laid on the model's config"),
    "overrides_of_model_config": (BOTH, "fields laid on the model's config"),
    "rope_scaling": (("numbers",), "scaled positions"),
    "freeze_mm_modules": (BOTH, "the text model alone is predicted"),
    "expert_parallel_size": (BOTH, "set parallel.expert"),
    "heads_k_stride": (("time",), "how context parallelism exchanges heads"),
    "ring_attn_func": (("time",), "how context parallelism exchanges keys"),
    "lisa_n_layers": (BOTH, "some layers train at a time; predicted with all"),
    "batch_flattening": (BOTH, "sequences without padding; every sequence has batch.seq tokens"),
    "embedding_lr": (("numbers",), "another learning rate of the embedding"),
    "lr_groups": (("numbers",), "learning rates of groups"),
    "loraplus_lr_ratio": (("numbers",), "another learning rate of half the adapter"),
    "device_map": (BOTH, "layers on several GPUs without parallelism"),
    "trl": (BOTH, "sampling and rewards are not predicted"),
    "vllm": (BOTH, "sampling is not predicted"),
    "reward_model": (BOTH, "a reward model's loss"),
    "process_reward_model": (BOTH, "a reward model's loss"),
    "num_labels": (BOTH, "a classification head"),
    "ebft": (BOTH, "another objective"),
    "diffusion": (BOTH, "another objective"),
    "llmcompressor": (BOTH, "another objective"),
    "fp32_norms": (("memory",), "norms in float32"),
    "s2_attention": (("time", "numbers"), "shifted attention"),
    "jagged_restart_steps": (("numbers",), "restarts of the schedule"),
    "use_eaft": (("numbers",), "another loss"),
    "eaft_alpha": (("numbers",), "another loss"),
    "eaft_k": (("numbers",), "another loss"),
    "lisa_step_interval": (("time",), "some layers train at a time; predicted with all"),
    "lisa_layers_attribute": (BOTH, "some layers train at a time; predicted with all"),
    "relora_prune_ratio": (("numbers",), "restarts of the adapter"),
    "peft": (("numbers",), "how the adapter begins"),
    "loftq_config": (("numbers",), "how the adapter begins"),
    "fused_attn_kernel": (BOTH, "a kernel that keeps fewer activations"),
    "gemma4_hybrid_attn_impl": (("time",), "kernels by layer"),
    "llama4_linearized_experts": (BOTH, "experts as separate linear layers"),
    "use_onebitllms": (BOTH, "weights of one bit"),
    "flash_optimum": (("time",), "another kernel of attention"),
    "center_rewards_coefficient": (("numbers",), "a term of a reward model's loss"),
}
OTHER_PAIRS = ("orpo", "simpo", "cpo")
"""Losses of pairs without a reference."""


def read(reading: Reading) -> None:
    """Read an axolotl config."""
    if reading.has("base_model"):
        reading.know("model", reading.text("base_model"), "base_model")
    if reading.flag("reinit_weights"):
        reading.know("starts_random", True, "reinit_weights")
    _batch(reading)
    _adapter(reading)
    _dtypes(reading)
    _attention(reading)
    _recompute(reading)
    _kernels(reading)
    _parallel(reading)
    read_trainer(reading, lr=2e-4, optimizer="optimizer", recompute=None, autocast=None)
    leave_all(reading, WITHOUT)
    reading.idle(
        IDLE,
        prefixes=(
            "wandb_",
            "mlflow_",
            "comet_",
            "swanlab_",
            "hub_",
            "save_",
            "eval_steps",
            "trackio_",
            "jagged_restart_",
            "otel_",
            "ray_",
            "use_swanlab",
            "use_otel",
        ),
    )
    reading.finish()


def _batch(reading: Reading) -> None:
    preference = reading.word("rl", "")
    pairs = 2 if preference in OTHER_PAIRS else 1
    note = "a pair is two sequences" if pairs == 2 else ""
    reading.take_or_assume(
        "micro_batch_size", "batch.micro", reading.whole("micro_batch_size", 1) * pairs, note
    )
    reading.take_or_assume(
        "gradient_accumulation_steps", "batch.accumulate", reading.whole("gradient_accumulation_steps", 1)
    )
    reading.take_or_assume("sample_packing", "data.pack", bool(reading.flag("sample_packing", False)), APART)
    packed = bool(reading.flag("sample_packing", False) or reading.flag("pad_to_sequence_len", False))
    note = "" if packed else "the most; without packing, shorter samples take less"
    reading.take_or_assume(
        "sequence_len", "batch.seq", reading.whole("sequence_len", 512, at_least=2), note, note
    )
    reading.idle(["sample_packing", "pad_to_sequence_len", "pad_to_multiple_of", "streaming"])
    reading.leave("batch_size", ("numbers",), "micro_batch_size x gradient_accumulation_steps x GPUs says it")
    if preference in ("dpo", "ipo"):
        _preference(reading, preference)
    elif preference in OTHER_PAIRS:
        reading.leave("rl", ("time",), "another loss of pairs; predicted as next-token training")
    else:
        reading.leave("rl", ("memory", "time"), "another objective; predicted as next-token training")


def _preference(reading: Reading, kind: str) -> None:
    reading.take("rl", "objective.name", "dpo")
    if kind == "ipo":
        reading.draft.set("objective.loss", "ipo")
    take_pair_loss(reading, loss="dpo_loss_type", beta="rl_beta", label_smoothing="dpo_label_smoothing")
    inner = reading.inside("trl")
    if inner.has("beta") and inner.number("beta") > 0:  # It comes before rl_beta.
        reading.draft.forget("objective.beta")
        inner.take("beta", "objective.beta", inner.number("beta"))
    reading.leave("rpo_alpha", ("numbers",), "a term of the chosen answers' loss")
    reading.leave(
        "precompute_ref_log_probs", ("memory", "time"), "the reference's forward is part of each step"
    )
    reading.idle(["dpo_use_weighting", "dpo_use_logits_to_keep", "dpo_norm_loss", "dpo_use_liger_kernel"])


def _adapter(reading: Reading) -> None:
    kind = reading.word("adapter")
    names = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear")
    if kind in ("lora", "qlora"):
        reading.accounted("adapter")
        reading.take("adapter", "adapter.kind", "lora")
        take_lora(
            reading,
            rank="lora_r",
            alpha="lora_alpha",
            dropout="lora_dropout",
            default_rank=8,
            default_alpha=8,
        )
        if reading.flag("lora_target_linear"):
            reading.take("lora_target_linear", "adapter.targets", "all-linear")
            reading.idle(["lora_target_modules"])
        elif not take_targets(reading, "lora_target_modules"):
            reading.draft.know("targets", None, reading.full("lora_target_modules"), is_stated=False)
    elif kind is not None:
        reading.leave("adapter", BOTH, "another kind of adapter; predicted as training of every weight")
    in_4bit, in_8bit = bool(reading.flag("load_in_4bit")), bool(reading.flag("load_in_8bit"))
    if kind in ("lora", "qlora"):
        in_4bit = in_4bit or (kind == "qlora" and not reading.has("load_in_4bit"))
        extra = reading.inside("bnb_config_kwargs")
        double = bool(extra.flag("bnb_4bit_use_double_quant", True))
        by = "load_in_4bit" if reading.has("load_in_4bit") else "adapter"
        take_bitsandbytes(
            reading,
            in_4bit=in_4bit,
            in_8bit=in_8bit and not in_4bit,
            default_double=double,
            by=by if in_4bit else "load_in_8bit",
        )
        extra.idle(extra.values)
    else:
        for name in ("load_in_4bit", "load_in_8bit"):
            if reading.flag(name):
                reading.leave(name, BOTH, "a quantised base without an adapter trains nothing")
    if kind in ("lora", "qlora"):
        take_adapter_variants(
            reading, dora="peft_use_dora", rslora="peft_use_rslora", saved="lora_modules_to_save"
        )
    reading.idle([*names, "load_in_4bit", "load_in_8bit"])


def _dtypes(reading: Reading) -> None:
    """Note the dtype of the weights, which axolotl takes from the precision, and autocast."""
    word, plain = reading.word("bf16", "auto"), reading.flag("bfloat16")
    if reading.flag("fp8"):
        reading.know("compute", "fp8", "fp8")
    name = "bfloat16" if plain else "bf16"
    half = next((one for one in ("fp16", "float16") if reading.flag(one)), None)
    if plain or word in ("auto", "full") or reading.flag("bf16"):
        reading.draft.know("weights", "bf16", reading.full(name), word, is_stated=reading.has(name))
        reading.draft.know("compute", "bf16", reading.full(name), word, is_stated=reading.has(name))
    elif half:
        reading.draft.know("weights", "fp16", reading.full(half), True)
        if half == "fp16":
            reading.draft.know("compute", "fp16", reading.full(half), True)
    else:
        reading.draft.know("weights", "fp32", reading.full("bf16"), word)
    reading.accounted("bf16", "fp16", "fp8", "bfloat16", "float16", "float32")
    for one in ("bf16", "fp16", "fp8", "bfloat16", "float16", "float32"):
        if reading.has(one) and one not in (name, half):
            reading.draft.idle.append(reading.full(one))


def _attention(reading: Reading) -> None:
    if reading.has("attn_implementation"):
        take_attention(reading, "attn_implementation")
    else:
        words = {
            "flash_attention": "flash",
            "sdp_attention": "sdpa",
            "xformers_attention": "efficient",
            "eager_attention": "eager",
        }
        for name, value in words.items():
            if reading.flag(name):
                reading.take(name, "attention", value)
                break
    reading.idle(["flash_attention", "sdp_attention", "xformers_attention", "eager_attention"])


def _recompute(reading: Reading) -> None:
    word = reading.word("gradient_checkpointing")
    if word in ("offload", "offload_disk", "unsloth"):
        reading.know("recompute", True, "gradient_checkpointing")
        reading.draft.take(
            reading.full("gradient_checkpointing"),
            word,
            "offload.activations",
            True,
            "inputs of blocks on the host",
        )
    else:
        take_recompute(reading, "gradient_checkpointing", default=False)
    offloading = reading.word("activation_offloading", "false")
    if offloading not in ("false", "no", "none"):
        reading.take("activation_offloading", "offload.activations", True)
        reading.draft.know("recompute", True, reading.full("activation_offloading"), offloading)
    reading.idle(["activation_offloading"])


def _kernels(reading: Reading) -> None:
    """Set the loss and the kernels of Liger and of cut cross-entropy."""
    for name, field, value in (
        ("liger_fused_linear_cross_entropy", "loss", "fused"),
        ("cut_cross_entropy", "loss", "fused"),
        ("chunked_cross_entropy", "loss", "chunked"),
        ("liger_rms_norm", "block_kernels", "triton"),
        ("liger_glu_activation", "block_kernels", "triton"),
        ("liger_swiglu", "block_kernels", "triton"),
        ("liger_rope", "block_kernels", "triton"),
    ):
        if reading.flag(name):
            reading.take(name, field, value)
        reading.idle([name])
    reading.idle(
        [
            "plugins",
            "liger_layer_norm",
            "liger_cross_entropy",
            "liger_rms_norm_gated",
            "chunked_cross_entropy_num_chunks",
        ]
    )


def _parallel(reading: Reading) -> None:
    for name, field in (
        ("tensor_parallel_size", "parallel.tensor"),
        ("dp_shard_size", "parallel.shard"),
        ("dp_replicate_size", "parallel.replicate"),
    ):
        size = reading.whole(name)
        if size is not None and size > 1:
            reading.take(name, field, size)
        reading.idle([name])
    name = reading.first("context_parallel_size", "sequence_parallel_degree")
    if reading.whole(name, 1) > 1:
        reading.take(name, "parallel.context", reading.whole(name))
    reading.idle([name])
    if reading.has("world_size"):
        reading.know("count", reading.whole("world_size"), "world_size")
    reading.idle(["fsdp_version"])


IMPORTER = Importer(
    name="axolotl",
    title="an axolotl config",
    marks=frozenset(
        """
        base_model micro_batch_size sequence_len sample_packing lora_target_linear val_set_size
        dataset_prepared_path special_tokens eval_sample_packing pad_to_sequence_len num_epochs
        lora_model_dir saves_per_epoch evals_per_epoch flash_attention
""".split()
    ),
    read=read,
    includes=("transformers",),
)
