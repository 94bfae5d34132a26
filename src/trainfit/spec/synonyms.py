"""Fields and values of other tools -> what they are called in a recipe: the answer to a key or a word that is refused.

From the options of transformers' TrainingArguments, TRL, PEFT, accelerate, DeepSpeed, torchtitan, axolotl and LLaMA-Factory.
They are answered and not accepted, because few mean exactly the same (their defaults, their weights' dtype).
"""

BF16 = "precision: bf16 (bf16 weights) or amp-bf16 (autocast over fp32 weights)"
FP16 = "precision: amp-fp16 (autocast over fp32 weights, with a loss scaler)"
RECOMPUTE = "recompute, such as recompute: full or recompute: selective"
COUNT = "hardware.count"
STEPS = "no field of a recipe, but an option: trainfit train --steps"

_FIELDS: dict[str, tuple[str, ...]] = {
    "batch.micro": (
        "batch_size", "micro_batch_size", "microbatch_size", "per_device_train_batch_size", "per_gpu_train_batch_size",
        "train_micro_batch_size_per_gpu", "local_batch_size", "device_batch_size", "mbs", "bs", "batch.size", "batch.micro_batch",
        "micro_batch", "micro",
    ),
    "batch.micro x batch.accumulate x hardware.count": ("global_batch_size", "train_batch_size", "effective_batch_size", "gbs"),
    "batch.accumulate": (
        "gradient_accumulation_steps", "gradient_accumulation", "grad_accum", "grad_accum_steps", "accumulate_grad_batches",
        "accumulation_steps", "accumulate",
    ),
    "batch.seq": (
        "max_seq_length", "max_seq_len", "max_length", "seq_len", "seq_length", "sequence_len", "sequence_length", "cutoff_len",
        "block_size", "context_length", "context_len", "model_max_length", "seqlen", "seq", "batch.length", "n_ctx",
    ),
    BF16: ("bf16", "bfloat16", "mixed_precision", "torch_dtype", "dtype", "amp", "autocast", "bnb_4bit_compute_dtype",
           "mixed_precision_param", "param_dtype", "compute_dtype"),
    FP16: ("fp16", "float16"),
    "precision: fp8": ("fp8", "float8", "enable_fp8"),
    "precision: fp32": ("fp32", "float32"),
    "attention, such as attention: flash": (
        "attn_implementation", "attn_impl", "flash_attention", "flash_attention_2", "flash_attn", "use_flash_attention",
        "use_flash_attention_2", "use_flash_attn", "sdp_attention", "sdpa", "sdp_backend", "attention_implementation",
    ),
    "attention: efficient": ("xformers", "xformers_attention", "memory_efficient_attention"),
    "block_kernels: triton and loss: fused": ("use_liger_kernel", "liger_kernel", "liger"),
    "loss: fused": ("liger_fused_linear_cross_entropy", "fused_linear_cross_entropy", "cut_cross_entropy"),
    "loss: chunked": ("chunked_cross_entropy", "loss_chunks"),
    "loss_terms.label_smoothing": ("label_smoothing_factor", "label_smoothing"),
    "loss_terms.z_loss": ("z_loss", "z_loss_weight"),
    RECOMPUTE: (
        "gradient_checkpointing", "use_gradient_checkpointing", "activation_checkpointing", "activation_checkpoint",
        "activation_checkpoint_mode", "enable_activation_checkpointing", "checkpointing", "checkpoint_activations",
        "recompute_activations", "recompute_granularity", "selective_ac_option", "fsdp_activation_checkpointing", "remat",
    ),
    "recompute: {budget: 0.5}, with compile": ("activation_memory_budget", "memory_budget"),
    "compile: block or compile: model": ("torch_compile", "use_compile", "torch_compile_mode", "enable_compile"),
    "optimizer.name": ("optim", "optimizer_type", "optimizer_name", "optim_type", "optimizer.type", "optimizer.kind"),
    "optimizer.implementation": ("fused_optimizer", "optimizer.fused", "optimizer.foreach"),
    "optimizer.lr": ("learning_rate", "lr", "base_lr", "peak_lr"),
    "optimizer.weight_decay": ("weight_decay", "wd"),
    "optimizer.momentum": ("momentum", "optimizer.beta1"),
    "optimizer.clip_norm": ("max_grad_norm", "gradient_clipping", "gradient_clip_val", "clip_grad_norm", "grad_clip", "max_norm"),
    "optimizer.in_backward": ("optimizer_in_bwd", "optimizer_in_backward", "fused_backward_pass"),
    "optimizer.stochastic_rounding": ("stochastic_rounding", "bf16_stochastic_round"),
    "adapter: {kind: lora}": ("lora", "peft", "use_peft", "use_lora", "peft_config", "peft_type", "finetuning_type", "lora_enable"),
    "adapter.kind": ("adapter.type", "adapter.name", "adapter.peft_type"),
    "adapter.rank": ("lora_r", "lora_rank", "adapter.r"),
    "adapter.alpha": ("lora_alpha",),
    "adapter.dropout": ("lora_dropout",),
    "adapter.targets": ("target_modules", "lora_target", "lora_target_modules", "lora_target_linear", "adapter.target"),
    "adapter.tokens": ("num_virtual_tokens", "prompt_tokens"),
    "quantize: nf4, with an adapter": ("load_in_4bit", "bnb_4bit_quant_type", "use_4bit", "qlora", "4bit", "nf4"),
    "quantize: int8, with an adapter": ("load_in_8bit", "use_8bit", "8bit", "int8"),
    "quantize": ("quantization", "quantization_bit", "quantization_config", "quant"),
    "offload.weights": ("cpu_offload", "offload_param", "offload_params", "offload_parameters", "fsdp_offload_params",
                        "offload_optimizer", "enable_cpu_offload", "offload.params", "offload.optimizer"),
    "offload.activations": ("activation_offloading", "offload_activations", "activation_offload", "enable_activation_offloading",
                            "activation_cpu_offload"),
    "loader.workers": ("dataloader_num_workers", "num_workers", "loader.num_workers"),
    "loader.prefetch": ("dataloader_prefetch_factor", "prefetch_factor"),
    "loader.pin_memory": ("dataloader_pin_memory", "pin_memory"),
    "empty_cache_every": ("torch_empty_cache_steps", "empty_cache", "empty_cache_steps"),
    COUNT: (
        "world_size", "num_gpus", "n_gpu", "n_gpus", "ngpu", "ngpus", "gpus", "gpu_count", "num_devices", "devices",
        "nproc_per_node", "num_processes", "gpus_per_node", "num_gpus_per_node", "count", "hardware.num",
    ),
    "hardware.gpu": ("gpu", "gpu_name", "gpu_type", "device", "accelerator", "device_name", "hardware.name", "hardware.type"),
    "hardware.price_per_hour": ("price", "price_per_hour", "hardware.price"),
    "parallel.tensor": ("tensor_parallel_size", "tensor_parallel_degree", "tensor_model_parallel_size", "tp_size", "tp", "tensor"),
    "parallel.shard": ("data_parallel_shard_degree", "dp_shard", "fsdp", "fsdp_config", "zero_stage", "zero_optimization", "shard",
                       "parallel.fsdp"),
    "parallel.replicate": ("data_parallel_replicate_degree", "dp_replicate", "ddp", "data_parallel_size", "replicate",
                           "parallel.data", "parallel.ddp"),
    "model.config": ("model_name_or_path", "base_model", "model_name", "pretrained_model_name_or_path", "model_id", "config",
                     "model.path", "model.id", "model.name_or_path", "model.model_name_or_path", "model.base"),
    "model.implementation": ("implementation", "model_impl", "model.impl"),
    STEPS: ("max_steps", "steps", "training_steps", "num_train_epochs", "epochs", "num_epochs"),
}  # fmt: skip
"""What to write here -> keys of other tools; one with a dot only where it stands in that field."""

FIELDS: dict[str, str] = {key: here for here, keys in _FIELDS.items() for key in keys}

ADAMW_8BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "adam8bit", "8bit_adam")
VALUES: dict[str, dict[str, tuple[str, ...]]] = {
    "precision": {
        "bf16": ("bfloat16", "torch.bfloat16", "bf16_true", "pure_bf16"),
        "fp32": ("float32", "torch.float32", "float", "no", "full", "32", "32_true"),
        "amp-bf16": ("mixed", "mixed_precision", "amp", "bf16_mixed", "bf16_amp", "autocast"),
        "amp-fp16": ("fp16", "float16", "torch.float16", "half", "16", "16_mixed", "fp16_mixed", "fp16_amp"),
        "fp8": ("float8", "f8", "fp8_mixed"),
    },
    "attention": {
        "flash": ("flash_attention", "flash_attention_2", "flash_attn", "flash_attn_2", "flash2", "fa2", "fa",
                  "flash_attention_3", "fa3", "sdpa_flash", "flashattention"),
        "efficient": ("xformers", "mem_efficient", "memory_efficient", "efficient_attention", "sdpa_mem_efficient"),
        "cudnn": ("cudnn_attention", "sdpa_cudnn"),
        "eager": ("standard", "vanilla", "naive", "manual", "unfused"),
        "sdpa": ("torch_sdpa", "scaled_dot_product", "default", "auto"),
    },
    "optimizer.name": {
        "adamw": ("adam", "adamw_torch", "adamw_hf", "adamw_torch_fused", "adamw_torch_xla", "paged_adamw", "paged_adamw_32bit",
                  "adamw_apex_fused", "fusedadam"),
        "adamw8bit": ADAMW_8BIT,
        "adamw4bit": ("adamw_4bit", "adamw_torch_4bit", "adam4bit"),
        "adafactor": ("adafactor_hf",),
    },
    "quantize": {
        "nf4": ("4bit", "4", "int4", "bnb_4bit", "bnb_nf4", "bitsandbytes", "load_in_4bit", "qlora", "true"),
        "int8": ("8bit", "8", "llm_int8", "bnb_8bit", "load_in_8bit"),
        "fp8": ("float8", "f8"),
    },
    "adapter.kind": {
        "lora": ("peft", "true"),
        "lora, with quantize: nf4": ("qlora",),
        "prompt": ("prompt_tuning", "soft_prompt"),
        "prefix": ("prefix_tuning",),
        "p-tuning": ("ptuning", "p_tuning_v2"),
        "null, for training every weight": ("full", "freeze", "false"),
    },
    "recompute": {
        "full": ("true", "gradient_checkpointing", "activation_checkpointing", "checkpointing", "checkpoint", "all", "block",
                 "uniform", "unsloth"),
        "selective": ("op", "ops", "partial", "sac"),
        "none": ("false", "off", "no"),
    },
    "compile": {"block or model": ("true", "default", "inductor", "max_autotune", "reduce_overhead")},
    "loss": {
        "fused": ("liger", "fused_linear", "cut_cross_entropy", "cce"),
        "chunked": ("chunk", "chunks", "linear_chunked"),
        "standard": ("cross_entropy", "default"),
    },
    "block_kernels": {"triton": ("liger", "true")},
    "model.implementation": {"hf": ("transformers", "huggingface"), "native": ("trainfit",)},
}  # fmt: skip
"""Field -> what to write here -> words of other tools."""


def field_here(path: str) -> str | None:
    """What the key at the dotted ``path`` is called in a recipe, or None: ``batch_size`` is ``batch.micro``."""
    folded = path.lower().replace("-", "_")
    return FIELDS.get(folded) or FIELDS.get(folded.rpartition(".")[2])


def value_here(field: str, value: object) -> str | None:
    """What to write for ``value`` in the dotted ``field``, or None: ``flash_attention_2`` of ``attention`` is ``flash``."""
    if not isinstance(value, str | bool | int):
        return None
    word = str(value).lower().replace("-", "_").replace(" ", "_")
    return next((here for here, words in VALUES.get(field, {}).items() if word in words), None)
