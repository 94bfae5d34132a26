"""DeepSpeed's JSON: ZeRO stages, offload, precision, batch and clipping; "auto" leaves it to other files."""

from typing import Any

from trainfit.integrations.importers.base import Importer, Reading
from trainfit.integrations.importers.vocabulary import leave_all, take_optimizer
from trainfit.spec.imported import Change

AUTO = "auto"
STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
IDLE = """
wall_clock_breakdown steps_per_print dump_state zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
prescale_gradients gradient_predivide_factor tensorboard wandb csv_monitor comet monitor_config
flops_profiler comms_logger checkpoint disable_allgather memory_breakdown data_types scheduler elasticity
autotuning seed communication_data_type
""".split()
ZERO_IDLE = """
contiguous_gradients overlap_comm reduce_scatter allgather_partitions sub_group_size round_robin_gradients
stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save ignore_unused_parameters
elastic_checkpoint load_from_fp32_weights zero_quantized_nontrainable_weights
stage3_gather_fp16_weights_on_model_save legacy_stage1 param_persistence_threshold
use_all_reduce_for_fetch_params
""".split()
BUFFERS: tuple[str, ...] = tuple(
    """
    reduce_bucket_size allgather_bucket_size stage3_prefetch_bucket_size stage3_param_persistence_threshold
    stage3_max_live_parameters stage3_max_reuse_distance max_live_parameters max_reuse_distance
    prefetch_bucket_size
""".split()
)
BUFFER_NOTE = "a size of DeepSpeed's buffers; FSDP2 gathers a block at a time"
WITHOUT: dict[str, tuple[tuple[Change, ...], str]] = {
    "activation_checkpointing": (("memory",), "holds only for models that call DeepSpeed's checkpointing"),
    "compression_training": (("memory", "time", "numbers"), "compression is not predicted"),
    "sparse_attention": (("memory", "time", "numbers"), "predicted with dense attention"),
    "data_efficiency": (("memory", "time"), "every sequence has batch.seq tokens"),
    "curriculum_learning": (("memory", "time"), "every sequence has batch.seq tokens"),
    "progressive_layer_drop": (("time", "numbers"), "every layer runs"),
    "amp": (("memory", "time"), "Apex's mixed precision; predicted without it"),
    "aio": (("time",), "settings of the NVMe offload"),
    "tensor_parallel": (("memory", "time"), "set parallel.tensor"),
    "sequence_parallel_size": (("memory", "time"), "set parallel.context"),
    "pipeline": (("memory", "time"), "set parallel.pipeline"),
    "compile": (("memory", "time"), "set compile: block or model"),
    "torch_autocast": (("memory", "time"), "set precision: amp-bf16"),
}


def read(reading: Reading) -> None:
    """Read a DeepSpeed config."""
    auto = [name for name, value in reading.values.items() if value == AUTO]
    reading.idle(auto)
    _batch(reading)
    _precision(reading)
    if reading.has("gradient_clipping") and "gradient_clipping" not in auto:
        _clipping(reading)
    zero = reading.inside("zero_optimization")
    read_zero(zero)
    zero.finish()
    reading.draft.know("deepspeed", True, reading.full("zero_optimization"), is_stated=False)
    _optimizer(reading)
    leave_all(reading, WITHOUT)
    reading.idle(IDLE)
    reading.finish()


def _is_auto(reading: Reading, name: str) -> bool:
    return reading.raw(name) == AUTO


def _batch(reading: Reading) -> None:
    fields = {
        "train_micro_batch_size_per_gpu": "batch.micro",
        "gradient_accumulation_steps": "batch.accumulate",
    }
    for name, field in fields.items():
        if reading.has(name) and not _is_auto(reading, name):
            reading.take(name, field, reading.whole(name))
    if reading.has("train_batch_size") and not _is_auto(reading, "train_batch_size"):
        reading.know("global_batch", reading.whole("train_batch_size"), "train_batch_size")


def _clipping(reading: Reading) -> None:
    value = reading.number("gradient_clipping")
    if value > 0:
        reading.take("gradient_clipping", "optimizer.clip_norm", value)
    else:
        reading.idle(["gradient_clipping"])


def _precision(reading: Reading) -> None:
    for name, key in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        inner = reading.inside(name)
        if inner.has("enabled") and not _is_auto(inner, "enabled"):
            if inner.flag("enabled"):
                inner.know("compute", key, "enabled")
            else:
                inner.idle(["enabled"])
        inner.idle(inner.values)


def read_zero(zero: Reading) -> None:
    """Read ``zero_optimization``: the stage and what waits on the host."""
    if zero.has("stage"):
        stage = zero.whole("stage", at_least=0)
        if stage not in STAGES:
            raise zero.error("stage", "0, 1, 2 or 3", "correct it")
        zero.know("sharding", STAGES[stage], "stage")
    for name, key in (("offload_param", "offload_params"), ("offload_optimizer", "offload_optimizer")):
        inner = zero.inside(name)
        device = inner.word("device", "none")
        if device in ("cpu", "nvme"):
            inner.know(key, True, "device")
        if device == "nvme":
            note = "predicted as host memory; an NVMe drive is slower"
            zero.draft.leave(inner.full("device"), device, ("time",), note)
        inner.idle(inner.values)
    for name in ("cpu_offload", "cpu_offload_params"):  # Of versions before 0.4
        if zero.flag(name):
            zero.know("offload_params" if name.endswith("params") else "offload_optimizer", True, name)
    zero.idle(["cpu_offload", "cpu_offload_params"])
    for name in BUFFERS:
        zero.leave(name, ("memory", "time"), BUFFER_NOTE, off=(AUTO,))
    for name in (
        "zero_hpz_partition_size",
        "zero_quantized_weights",
        "zero_quantized_gradients",
        "mics_shard_size",
    ):
        zero.leave(name, ("memory", "time"), "ZeRO++ is not predicted", off=(1, -1, False))
    zero.idle(ZERO_IDLE)


def _optimizer(reading: Reading) -> None:
    optimizer = reading.inside("optimizer")
    if not optimizer.has("type"):
        optimizer.finish()
        return
    take_optimizer(optimizer, "type", "adamw")
    if optimizer.draft.value("optimizer.name") == "adamw":
        optimizer.draft.set("optimizer.implementation", "fused")  # DeepSpeed's own kernel
    inner = optimizer.inside("params")
    for name, field in (("lr", "optimizer.lr"), ("weight_decay", "optimizer.weight_decay")):
        value: Any = inner.raw(name)
        # A rate of 0 stands for one that the script sets; a decay of 0 is none.
        if value is not None and value != AUTO and (inner.number(name) > 0 or name == "weight_decay"):
            inner.take(name, field, inner.number(name))
    inner.idle(inner.values)
    optimizer.idle(["legacy_fusion"])
    optimizer.finish()


IMPORTER = Importer(
    name="deepspeed",
    title="a DeepSpeed config",
    marks=frozenset(
        """
        zero_optimization zero_optimization.stage train_micro_batch_size_per_gpu train_batch_size
        zero_allow_untested_optimizer gradient_clipping bf16.enabled fp16.enabled steps_per_print
        wall_clock_breakdown optimizer.type scheduler.type
""".split()
    ),
    read=read,
    order=30,
    alone=False,
)
