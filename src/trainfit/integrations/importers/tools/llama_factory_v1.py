"""LLaMA-Factory's second layout (v1): plugins for adapters, kernels, quantisation and sharding.

Its defaults: one sequence of 2,048 tokens, recomputed blocks, bf16, learning rate 1e-4.
"""

from trainfit.integrations.importers.base import Importer, Reading
from trainfit.integrations.importers.references import refer
from trainfit.integrations.importers.vocabulary import (
    leave_all,
    take_adapter_variants,
    take_attention,
    take_bitsandbytes,
    take_lora,
    take_optimizer,
    take_recompute,
    take_targets,
)
from trainfit.spec.imported import Change

IDLE = """
output_dir num_train_epochs max_steps train_dataset eval_dataset batching_workers lr_scheduler_config
dist_timeout full_determinism resume_from_checkpoint save_steps save_epochs save_ckpt_as_hf save_total_limit
logging_steps pref_loss pref_beta pref_ftx simpo_gamma dpo_label_smoothing ld_alpha custom_chat_template
trust_remote_code model_class init_config sample_backend max_new_tokens cp_mode dp_size template report_to
run_name
""".split()
BOTH: tuple[Change, ...] = ("memory", "time")
WITHOUT: dict[str, tuple[tuple[Change, ...], str]] = {
    "batching_strategy": (
        BOTH,
        "another number of tokens in each batch; every sequence has batch.seq tokens",
    ),
    "mp_shard_size": (BOTH, "set parallel.shard"),
    "ep_size": (BOTH, "set parallel.expert"),
}


def read(reading: Reading) -> None:
    """Read a config of the second layout."""
    if reading.has("model"):
        reading.know("model", reading.text("model"), "model")
    name = "micro_batch_size"
    reading.take_or_assume(name, "batch.micro", reading.whole(name, 1))
    note = "the most; shorter samples take less"
    reading.take_or_assume(
        "cutoff_len", "batch.seq", reading.whole("cutoff_len", 2048, at_least=2), note, note
    )
    if reading.has("global_batch_size"):
        reading.know("global_batch", reading.whole("global_batch_size"), "global_batch_size")
    take_recompute(reading, "enable_activation_checkpointing", default=True)
    reading.take_or_assume("learning_rate", "optimizer.lr", reading.number("learning_rate", 1e-4))
    reading.take_or_assume("max_grad_norm", "optimizer.clip_norm", reading.number("max_grad_norm", 1.0))
    if (seed := reading.whole("seed", at_least=0)) is not None:
        reading.take("seed", "seed", seed)
    half = reading.flag("bf16", True)
    reading.know("weights", "bf16" if half else "fp32", "bf16")
    if half:
        reading.draft.know("compute", "bf16", reading.full("bf16"), True, is_stated=reading.has("bf16"))
    if reading.word("flash_attn", "auto") != "auto":
        take_attention(reading, "flash_attn")
    reading.idle(["flash_attn"])
    _plugins(reading)
    if reading.whole("cp_size", 1) > 1:
        reading.take("cp_size", "parallel.context", reading.whole("cp_size"))
    if reading.whole("mp_replicate_size", 1) > 1:
        reading.take("mp_replicate_size", "parallel.replicate", reading.whole("mp_replicate_size"))
    leave_all(reading, {key: value for key, value in WITHOUT.items() if key != "batching_strategy"})
    if reading.word("batching_strategy", "normal") != "normal":
        reading.leave("batching_strategy", *WITHOUT["batching_strategy"])
    reading.idle([*IDLE, "cp_size", "mp_replicate_size", "batching_strategy"])
    reading.finish()


def _plugins(reading: Reading) -> None:
    """Read the mappings that name a plugin: adapter, kernels, quantisation, sharding, optimizer."""
    adapter = reading.inside("peft_config")
    kind = adapter.word("name")
    if kind == "lora":
        adapter.take("name", "adapter.kind", "lora")
        rank = adapter.whole("r", 8)
        take_lora(
            adapter,
            rank="r",
            alpha="lora_alpha",
            dropout="lora_dropout",
            default_rank=8,
            default_alpha=2 * rank,
        )
        if not take_targets(adapter, "target_modules"):
            adapter.draft.assume(adapter.full("target_modules"), "adapter.targets", "all-linear")
        take_adapter_variants(adapter)
    elif kind is not None:
        adapter.leave("name", BOTH, "predicted as training of every weight")
    adapter.idle(adapter.values)
    kernels = reading.inside("kernel_config")
    if "liger" in kernels.word("name", ""):
        kernels.take("name", "loss", "fused", "Liger's fused linear cross-entropy")
        kernels.draft.set("block_kernels", "triton")
    kernels.idle(kernels.values)
    quantized = reading.inside("quant_config")
    bits = quantized.whole("quantization_bit", 0, at_least=0)
    if bits in (4, 8) and kind == "lora":
        take_bitsandbytes(
            quantized, in_4bit=bits == 4, in_8bit=bits == 8, default_double=True, by="quantization_bit"
        )
    elif bits:
        quantized.leave("quantization_bit", BOTH, "a quantised base without an adapter trains nothing")
    quantized.idle(quantized.values)
    sharding = reading.inside("dist_config")
    word = sharding.word("name", "")
    if word == "deepspeed":
        sharding.draft.know("deepspeed", True, "", is_stated=False)
        if (file := sharding.text("config_file")) is not None:
            refer(sharding, "config_file", file, "deepspeed")
    elif word:
        sharding.know("sharding", "fsdp", "name")
        sharding.draft.know("upcasts", True, "", is_stated=False)
    sharding.idle(sharding.values)
    reading.draft.know("sharding", "ddp", "", is_stated=False)
    optimizer = reading.inside("optim_config")
    take_optimizer(optimizer, "name", "adamw_torch_fused")
    optimizer.idle(optimizer.values)


IMPORTER = Importer(
    name="llama-factory-v1",
    title="a LLaMA-Factory config of the second layout",
    marks=frozenset(
        """
        dist_config kernel_config quant_config peft_config train_dataset model_class batching_strategy
        sample_backend cp_mode micro_batch_size cutoff_len
""".split()
    ),
    read=read,
    includes=("transformers",),
)
