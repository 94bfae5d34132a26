"""accelerate's YAML: processes, hosts, mixed precision, FSDP of version 1 or 2, DeepSpeed."""

from trainfit.integrations.importers.base import Importer, Reading
from trainfit.integrations.importers.references import refer
from trainfit.integrations.importers.tools.deepspeed import STAGES
from trainfit.integrations.importers.vocabulary import leave_all, read_fsdp
from trainfit.spec.imported import Change

IDLE = """
compute_environment debug distributed_type downcast_bf16 machine_rank main_training_function main_process_ip
main_process_port rdzv_backend rdzv_conf rdzv_id same_network tpu_env tpu_use_cluster tpu_use_sudo tpu_name
tpu_zone command_file commands use_cpu gpu_ids enable_cpu_affinity monitor_interval deepspeed_hostfile
main_process_type
""".split()
WITHOUT: dict[str, tuple[tuple[Change, ...], str]] = {
    "megatron_lm_config": (("memory", "time"), "set parallel.tensor and parallel.pipeline"),
    "fp8_config": (("memory", "time", "numbers"), "predicted with torch's scaled products"),
    "dynamo_config": (("memory", "time"), "set compile: block or model"),
}
SIZES = {
    "dp_replicate_size": "parallel.replicate",
    "dp_shard_size": "parallel.shard",
    "tp_size": "parallel.tensor",
    "cp_size": "parallel.context",
}
DEEPSPEED_IDLE = """
deepspeed_multinode_launcher zero3_init_flag zero3_save_16bit_model deepspeed_hostfile
deepspeed_moe_layer_cls_names offload_optimizer_nvme_path offload_param_nvme_path
seq_parallel_communication_data_type deepspeed_exclusion_filter deepspeed_inclusion_filter
""".split()


def read(reading: Reading) -> None:
    """Read an accelerate config."""
    kind = reading.word("distributed_type", "no")
    if (count := reading.whole("num_processes")) is not None:
        reading.know("count", count, "num_processes")
    if (nodes := reading.whole("num_machines")) is not None:
        if nodes > 1:
            reading.take("num_machines", "hardware.nodes", nodes)
        else:
            reading.idle(["num_machines"])
    compute = reading.word("mixed_precision", "no")
    if compute not in ("no", "bf16", "fp16", "fp8"):
        raise reading.error("mixed_precision", "no, bf16, fp16 or fp8", "correct it")
    if reading.has("mixed_precision") and compute != "no":
        reading.know("compute", compute, "mixed_precision")
    reading.idle(["mixed_precision"])
    if reading.has("gradient_accumulation_steps"):
        name = "gradient_accumulation_steps"
        reading.take(name, "batch.accumulate", reading.whole(name))
    fsdp = reading.inside("fsdp_config")
    if kind == "fsdp":
        reading.know("sharding", "fsdp", "distributed_type") if not _names_sharding(fsdp) else None
        reading.draft.know("upcasts", True, "", is_stated=False)
        read_fsdp(fsdp)
    fsdp.idle(fsdp.values)
    deepspeed = reading.inside("deepspeed_config")
    if kind == "deepspeed":
        _deepspeed(deepspeed)
    deepspeed.idle(deepspeed.values)
    if kind.startswith("multi_"):
        reading.know("sharding", "ddp", "distributed_type")
    _parallelism(reading.inside("parallelism_config"))
    leave_all(reading, WITHOUT)
    reading.idle(IDLE)
    reading.finish()


def _parallelism(reading: Reading) -> None:
    """Read the sizes of the mesh, whose names may begin with ``parallelism_config_``."""
    for name, field in SIZES.items():
        found = reading.first(f"parallelism_config_{name}", name)
        if reading.whole(found, 1) > 1:
            reading.take(found, field, reading.whole(found))
        reading.idle([found])
    reading.idle(reading.values)


def _names_sharding(fsdp: Reading) -> bool:
    return fsdp.has(fsdp.first("sharding_strategy", "fsdp_sharding_strategy"))


def _deepspeed(reading: Reading) -> None:
    reading.draft.know("deepspeed", True, "", is_stated=False)
    if (file := reading.text("deepspeed_config_file")) is not None:
        refer(reading, "deepspeed_config_file", file, "deepspeed")
    if reading.has("zero_stage"):
        stage = reading.whole("zero_stage", at_least=0)
        if stage not in STAGES:
            raise reading.error("zero_stage", "0, 1, 2 or 3", "correct it")
        reading.know("sharding", STAGES[stage], "zero_stage")
    for name, key in (
        ("offload_optimizer_device", "offload_optimizer"),
        ("offload_param_device", "offload_params"),
    ):
        if reading.word(name, "none") != "none":
            reading.know(key, True, name)
        reading.idle([name])
    if reading.has("gradient_accumulation_steps") and reading.raw("gradient_accumulation_steps") != "auto":
        name = "gradient_accumulation_steps"
        reading.take(name, "batch.accumulate", reading.whole(name))
    if reading.has("gradient_clipping") and reading.raw("gradient_clipping") != "auto":
        reading.take("gradient_clipping", "optimizer.clip_norm", reading.number("gradient_clipping"))
    reading.idle([*DEEPSPEED_IDLE, "gradient_accumulation_steps", "gradient_clipping"])
    reading.finish()


IMPORTER = Importer(
    name="accelerate",
    title="an accelerate config",
    marks=frozenset(
        """
        compute_environment distributed_type num_processes num_machines machine_rank mixed_precision
        main_training_function rdzv_backend same_network downcast_bf16 tpu_use_cluster use_cpu
        deepspeed_config.zero_stage deepspeed_config.deepspeed_config_file
""".split()
    ),
    read=read,
    order=20,
    alone=False,
)
