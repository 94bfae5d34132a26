"""Configs of transformers' Trainer and of TRL: their names, defaults, and fields that no recipe has."""

from trainfit.spec.imported import Change

TRAINER = ("TrainingArguments", "Seq2SeqTrainingArguments")
PAIRS = ("DPOConfig", "RewardConfig", "CPOConfig", "ORPOConfig")
GENERATE = ("GRPOConfig", "RLOOConfig", "PPOConfig", "OnlineDPOConfig", "GKDConfig")
TRL = ("SFTConfig", "KTOConfig", "BCOConfig", *PAIRS, *GENERATE)
OF_PREFERENCES = dict.fromkeys(
    "DPOConfig KTOConfig BCOConfig CPOConfig ORPOConfig GRPOConfig RLOOConfig".split(), 1e-6
)
LEARNING_RATES = {**OF_PREFERENCES, "RewardConfig": 1e-4, "PPOConfig": 3e-6, "OnlineDPOConfig": 5e-7}
"""TRL's default of the learning rate by config; of the others 2e-5."""
LENGTHS = {"OnlineDPOConfig": 512, "GKDConfig": 1024}
"""Configs that sample, and state the length of prompt and answer as one: its default."""
TRAINERS_OF_TRL = tuple(name.replace("Config", "Trainer") for name in TRL)

IDLE = """
output_dir overwrite_output_dir do_train do_eval do_predict prediction_loss_only num_train_epochs max_steps
lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio adam_beta1 adam_beta2 adam_epsilon log_level
log_level_replica log_on_each_node logging_dir logging_strategy logging_first_step logging_steps
logging_nan_inf_filter save_strategy save_steps save_total_limit save_safetensors save_on_each_node
save_only_model restore_callback_states_from_checkpoint use_cpu no_cuda use_mps_device data_seed
jit_mode_eval use_ipex tpu_num_cores tpu_metrics_debug debug dataloader_drop_last eval_strategy
evaluation_strategy eval_steps eval_delay eval_on_start evals_per_epoch past_index run_name disable_tqdm
remove_unused_columns label_names load_best_model_at_end metric_for_best_model greater_is_better
ignore_data_skip skip_memory_metrics report_to length_column_name ddp_backend ddp_broadcast_buffers
ddp_timeout ddp_find_unused_parameters ddp_static_graph resume_from_checkpoint hub_model_id hub_strategy
hub_token hub_private_repo hub_always_push hub_revision push_to_hub push_to_hub_model_id
push_to_hub_organization push_to_hub_token include_inputs_for_metrics include_for_metrics
eval_do_concat_batches batch_eval_metrics include_tokens_per_second include_num_input_tokens_seen
split_batches dispatch_batches local_rank dataloader_persistent_workers dataloader_multiprocessing_context
dataloader_in_order full_determinism project accelerator_config average_tokens_across_devices
eval_use_gather_object enable_jit_checkpoint trackio_space_id trackio_bucket_id trackio_static_space_id
torch_compile_backend gradient_checkpointing_kwargs activation_checkpointing_kwargs use_cache tf32
bf16_full_eval fp16_full_eval half_precision_backend fp16_opt_level dataset_name dataset_config
dataset_train_split dataset_test_split dataset_streaming dataset_mixture dataset_mixer dataset_splits
dataset_configs hub_model_revision dataset_text_field dataset_kwargs dataset_num_proc dataset_batch_size
chat_template chat_template_path eos_token pad_token model_revision revision trust_remote_code
use_auth_token token cache_dir low_cpu_mem_usage device_map tokenizer_name_or_path train_file
validation_file preprocessing_num_workers max_train_samples max_eval_samples streaming truncation_mode
shuffle_dataset packing_strategy completion_only_loss assistant_only_loss ignore_bias_buffers system_prompt
data_dir text_column wandb_entity wandb_project wandb_run_group benchmarks callbacks decontaminate_bigbench
use_fast_tokenizer concatenate attn_kwargs task lora_task_type model_name
""".split()
NUMBERS = ("numbers",)
BOTH = ("memory", "time")
WITHOUT: dict[str, tuple[tuple[Change, ...], str]] = {
    "neftune_noise_alpha": (NUMBERS, "noise on the embeddings"),
    "per_device_eval_batch_size": (
        ("memory",),
        "evaluation with larger batches than training may set the peak",
    ),
    "per_gpu_eval_batch_size": (("memory",), "evaluation with larger batches than training may set the peak"),
    "eval_accumulation_steps": (("memory",), "predictions of an evaluation wait on the GPU"),
    "auto_find_batch_size": (BOTH, "the batch is halved until it fits; predicted as it stands"),
    "train_sampling_strategy": (("time",), "sequences of like lengths; every sequence has batch.seq tokens"),
    "group_by_length": (("time",), "sequences of like lengths; every sequence has batch.seq tokens"),
    "optim_args": (("numbers",), "arguments of the optimizer"),
    "optim_target_modules": (BOTH, "an optimizer for some modules; predicted as one for all"),
    "parallelism_config": (BOTH, "set parallel.tensor, parallel.context and parallel.replicate"),
    "liger_kernel_config": (BOTH, "all of Liger's kernels are predicted"),
    "padding_free": (BOTH, "sequences without padding; every sequence has batch.seq tokens"),
    "use_liger_loss": (BOTH, "set loss: fused"),
    "eval_packing": (("memory",), "an evaluation's sequences"),
    "pad_to_multiple_of": (("memory",), "a few more tokens of padding"),
    "loss_type": (NUMBERS, "another loss than the cross-entropy"),
    "dft": (NUMBERS, "another loss than the cross-entropy"),
    "router_aux_loss_coef": (NUMBERS, "a term of the loss"),
    "lora_target_parameters": (BOTH, "expert weights with an adapter"),
    "bnb_4bit_quant_storage": (BOTH, "predicted as bytes; sharded alike"),
    "max_prompt_length": (BOTH, "a part of the sequence's length"),
    "precompute_ref_log_probs": (BOTH, "the reference model's forwards run before the training"),
    "model_init_kwargs": (BOTH, "arguments of the model's loading"),
    "fp16_backend": (NUMBERS, "Apex's autocast"),
}
