"""torchtitan: TOML, a ``JobConfig(...)``, or a function that returns a ``Trainer.Config(...)``.

Its defaults: weights in fp32 with bf16 compute (FSDP2's mixed precision, or autocast on one GPU), selective
recomputation (of every second block in TOML, of every second product in ``Trainer.Config``), the rest of the
GPUs sharded.
"""

from typing import Any

from trainfit.integrations.importers import models
from trainfit.integrations.importers.base import Importer, Reading
from trainfit.integrations.importers.vocabulary import dtype, leave_all
from trainfit.spec.errors import InputError
from trainfit.spec.imported import Change

SECTIONS_IDLE = """
job profiling profiler metrics checkpoint comm lr_scheduler validation validator experimental
fault_tolerance debug memory_estimation tokenizer dataloader override hf_assets_path dump_folder
fault_tolerant
""".split()
DEBUG_MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 768,
    "vocab_size": 2048,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""torchtitan's llama3 debugmodel."""
FLAVORS = {
    ("llama3", "1b"): "llama-3.2-1b",
    ("llama3", "3b"): "llama-3.2-3b",
    ("llama3", "8b"): "llama-3.1-8b",
    ("llama3", "70b"): "llama-3.1-70b",
    ("llama3", "405b"): "llama-3.1-405b",
    ("llama2", "7b"): "llama-2-7b",
    ("llama2", "13b"): "llama-2-13b",
    ("llama2", "70b"): "llama-2-70b",
    ("deepseek_v3", "671b"): "deepseek-v3",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
}
SCHEDULES = {"1f1b": "1f1b", "interleaved1f1b": "interleaved", "gpipe": "gpipe"}
BOTH: tuple[Change, ...] = ("memory", "time")
WITHOUT: dict[str, dict[str, tuple[tuple[Change, ...], str]]] = {
    "parallelism": {
        "enable_async_tensor_parallel": (("time",), "collectives hidden behind products"),
        "enable_compiled_autograd": (("time",), "the backward compiled"),
        "enable_fsdp_symm_mem": (("time",), "set parallel.copy_engines"),
        "disable_loss_parallel": (BOTH, "the loss on whole logits"),
        "expert_tensor_parallel_degree": (BOTH, "experts sharded by tensor parallelism"),
        "pipeline_parallel_split_points": (BOTH, "blocks are spread evenly"),
        "pipeline_parallel_layers_per_stage": (BOTH, "blocks are spread evenly"),
        "module_fqns_per_model_part": (BOTH, "blocks are spread evenly"),
    },
    "training": {
        "gc_freq": (("time",), "Python's garbage collection"),
        "disable_cuda_graphs": (("time",), "the step as a CUDA graph"),
    },
}
PARALLEL_IDLE = """
fsdp_reshard_after_forward context_parallel_rotate_method pipeline_parallel_schedule_csv
pipeline_parallel_microbatch_size pipeline_parallel_first_stage_less_layers enable_sequence_parallel
spmd_backend pipeline_parallel_last_stage_less_layers context_parallel_load_balancer
context_parallel_ptrr_mask_key num_pp_microbatches
""".split()
TRAINING_IDLE = """
steps dataset dataset_path warmup_steps seed deterministic gc_debug data_parallel_degree
mixed_precision_reduce local_batch_size global_batch_size enable_cpu_offload compile gc_freq norm_type
""".split()


def read(reading: Reading) -> None:
    """Read a torchtitan config."""
    if not reading.values:
        functions = _functions(reading)
        remedy = (
            f"name one: {reading.source.path}:{functions[0]}" if functions else "name a file that has one"
        )
        known = f" ({', '.join(functions[:8])})" if functions else ""
        raise InputError(f"no single configuration in it{known}", remedy, file=reading.source.path)
    is_trainer = reading.callee.endswith("Trainer.Config")
    _model(reading)
    training, parallel = reading.inside("training"), reading.inside("parallelism")
    reading.draft.know("starts_random", True, "", is_stated=False)
    _parallel(parallel)
    _batch(training, parallel)
    _precision(training)
    _optimizer(reading, training)
    _recompute(reading, is_trainer)
    _compile(reading, training)
    _loss(reading)
    for inner, name in ((training, "training"), (parallel, "parallelism")):
        leave_all(inner, WITHOUT[name])
    parallel.idle(PARALLEL_IDLE)
    training.idle(TRAINING_IDLE)
    training.finish()
    parallel.finish()
    for name in SECTIONS_IDLE:
        reading.idle([name])
    reading.finish()


def _functions(reading: Reading) -> list[str]:
    from trainfit.integrations.importers.calls import config_functions
    from trainfit.spec.files import read_text
    from trainfit.spec.parsing.plain_data import MAX_FILE_BYTES

    path = reading.source.folder / reading.source.path.rpartition("/")[2]
    return config_functions(read_text(path, MAX_FILE_BYTES), str(path)) if path.suffix == ".py" else []


def _model(reading: Reading) -> None:
    """Set the model by its name and flavor, or of a function by its assets and its flavor."""
    section = reading.inside("model")
    spec = reading.inside("model_spec")
    flavor = section.text("flavor") or (str(spec.positional[0]) if spec.positional else "debugmodel")
    name = section.text("name", "")
    if not name:
        name = reading.source.folder.name if spec.positional else "llama3"
    assets = str(reading.text("hf_assets_path", "")).rpartition("/")[2]
    at = "flavor" if section.has("flavor") else "name"
    known = FLAVORS.get((name, flavor.lower())) or models.by_letters(f"{name}{flavor}")
    found = models.find(assets, reading.source.folder) if assets and not known else None
    full = section.full(at) if section.values else spec.full("flavor")
    if flavor == "debugmodel":
        reading.draft.take(full, flavor, "model.config", DEBUG_MODEL, "torchtitan's llama3 debugmodel")
        reading.draft.set("model.name", "torchtitan debugmodel")
    else:
        value = known or (found.config if found else f"{name} {flavor}")
        reading.draft.know("model", value, full, f"{name} {flavor}")
    converters = section.texts("converters", [])
    if converters:
        section.leave("converters", ("time",), "8-bit products are faster; predicted in bf16")
    if spec.has("converters"):
        spec.leave("converters", ("time",), "8-bit products are faster; predicted in bf16")
    spec.leave("attn_backend", ("time",), "predicted with torch's own choice (sdpa)", off=("sdpa",))
    section.idle(
        [
            "name",
            "flavor",
            "converters",
            "tokenizer_path",
            "hf_assets_path",
            "norm_type",
            "print_after_conversion",
            "use_flex_attn",
            "attn_mask_type",
            "tokenizer_type",
        ]
    )
    spec.idle(spec.values)
    section.finish()
    for name in ("float8", "mx", "quantize"):
        reading.idle([name])


def _batch(training: Reading, parallel: Reading) -> None:
    """Set the batch; a pipeline's micro-batches are the accumulated ones."""
    tokens = training.whole("num_tokens_per_microbatch_per_dp_rank")
    length = training.first("max_context_length", "seq_len")
    seq = training.whole(length, 2048, at_least=2)
    training.take_or_assume(length, "batch.seq", seq)
    name = training.first("local_batch_size", "batch_size")
    if tokens is not None:
        name = "num_tokens_per_microbatch_per_dp_rank"
        micro = max(1, tokens // seq)
    else:
        micro = training.whole(name, 8)
    if parallel.whole("pipeline_parallel_degree", 1) > 1:
        size = parallel.whole("pipeline_parallel_microbatch_size", 1)
        training.take_or_assume(
            name, "batch.accumulate", max(1, micro // size), "micro-batches of the pipeline"
        )
        training.draft.assume(parallel.full("pipeline_parallel_microbatch_size"), "batch.micro", size)
        training.idle(["local_batch_size", "batch_size"])
    else:
        training.take_or_assume(name, "batch.micro", micro)
    total = training.whole("global_batch_size", at_least=-1)
    if total is not None and total > 0:
        training.know("global_batch", total, "global_batch_size")
    total = training.whole("num_tokens_per_train_step", at_least=-1)
    if total is not None and total > 0:
        training.draft.know("global_batch", total // seq, training.full("num_tokens_per_train_step"), total)
    training.accounted("num_tokens_per_train_step")


def _precision(training: Reading) -> None:
    weights = dtype(training, "dtype") or "fp32"
    training.know("weights", weights, "dtype")
    compute = dtype(training, "mixed_precision_param") or "bf16"
    training.draft.know("only_by_shards", True, "", is_stated=False)
    training.know("compute", compute if weights == "fp32" else "no", "mixed_precision_param")
    if training.flag("enable_cpu_offload"):
        training.know("offload_params", True, "enable_cpu_offload")


def _optimizer(reading: Reading, training: Reading) -> None:
    inner = reading.inside("optimizer")
    kind = inner.text("name", "AdamW").lower()
    if kind in ("adamw", "adam", "muon"):
        inner.take_or_assume("name", "optimizer.name", "muon" if kind == "muon" else "adamw")
    else:
        inner.leave("name", ("memory", "numbers"), "predicted as AdamW with two moments a weight")
    words = {"for-loop": "forloop", "foreach": "foreach", "fused": "fused"}
    implementation = inner.text("implementation", "foreach" if inner.flag("fused") is False else "fused")
    if implementation not in words:
        raise inner.error("implementation", "fused, foreach or for-loop", "correct it")
    if kind != "muon":
        inner.take_or_assume("implementation", "optimizer.implementation", words[implementation])
    inner.take_or_assume("lr", "optimizer.lr", inner.number("lr", 8e-4))
    inner.take_or_assume("weight_decay", "optimizer.weight_decay", inner.number("weight_decay", 0.1))
    if inner.flag("early_step_in_backward"):
        inner.take("early_step_in_backward", "optimizer.in_backward", True)
    norm = training.number("max_norm", 1.0)
    if norm > 0:
        training.take_or_assume("max_norm", "optimizer.clip_norm", norm)
    inner.idle(["beta1", "beta2", "eps", "early_step_in_backward", "fused", "param_groups"])
    inner.finish()


def _recompute(reading: Reading, is_trainer: bool) -> None:
    """Note the recomputation: none, full, of every k-th block, selective, or a budget of the compiler."""
    inner = reading.inside("activation_checkpoint")
    mode = inner.word("mode")
    if inner.callee:
        mode = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}.get(
            inner.callee.removesuffix(".Config").rpartition(".")[2], mode
        )
        name, is_stated = inner.full("mode"), True
    else:
        name, is_stated = inner.full("mode"), mode is not None
        if mode is None and "activation_checkpoint" in reading.values and is_trainer:
            mode, is_stated = "none", True
    mode = mode or "selective"
    option = str(inner.raw("selective_ac_option", "op" if is_trainer else "2"))
    value: Any = {"full": True, "none": False}.get(mode)
    if mode == "selective" and option.isdecimal() and int(option) > 0:
        value = True if int(option) == 1 else {"every": int(option)}
    elif mode == "selective":
        value = {"selective": {"save": ["attention", "mm"], "every": 2}}
    elif mode == "memory_budget":
        value = {"budget": inner.number("memory_budget", 0.5)}
    if value is None:
        raise inner.error("mode", "none, selective, full or memory_budget", "correct it")
    reading.draft.know("recompute", value, name, mode, is_stated=is_stated)
    inner.idle(inner.values)


def _compile(reading: Reading, training: Reading) -> None:
    inner = reading.inside("compile")
    section, name = (inner, "enable") if inner.has("enable") else (training, "compile")
    if section.flag(name) and "model" in inner.texts("components", ["model", "loss"]):
        section.take(name, "compile", "block")
    leave_all(inner, {"enable_async_tensor_parallel": (("time",), "collectives hidden behind products")})
    inner.idle(["enable", "components", "backend", "graph_passes", "passes", "mode"])
    inner.finish()


def _loss(reading: Reading) -> None:
    inner = reading.inside("loss")
    if "Chunked" in inner.callee:
        reading.draft.take(reading.full("loss"), inner.callee, "loss", "chunked")
    inner.idle(inner.values)


def _parallel(parallel: Reading) -> None:
    for name, field in (
        ("data_parallel_replicate_degree", "parallel.replicate"),
        ("data_parallel_shard_degree", "parallel.shard"),
        ("tensor_parallel_degree", "parallel.tensor"),
        ("context_parallel_degree", "parallel.context"),
        ("pipeline_parallel_degree", "parallel.pipeline"),
        ("expert_parallel_degree", "parallel.expert"),
    ):
        size = parallel.whole(name, at_least=-1)
        if size is not None and size > 1:
            parallel.take(name, field, size)
        parallel.idle([name])
    if parallel.whole("pipeline_parallel_degree", 1) > 1:
        word = parallel.word("pipeline_parallel_schedule", "1f1b")
        if word in SCHEDULES:
            parallel.take_or_assume("pipeline_parallel_schedule", "parallel.schedule", SCHEDULES[word])
        else:
            parallel.leave("pipeline_parallel_schedule", BOTH, "predicted as 1F1B")
    parallel.idle(["pipeline_parallel_schedule"])
    replicated = parallel.whole("data_parallel_replicate_degree", 1) > 1
    alone = replicated and parallel.whole("data_parallel_shard_degree", -1, at_least=-1) == 1
    parallel.draft.know("sharding", "ddp" if alone else "fsdp", "", is_stated=False)
    word = parallel.word("fsdp_reshard_after_forward", "default")
    if word in ("always", "never"):
        parallel.know("reshard", word == "always", "fsdp_reshard_after_forward")


IMPORTER = Importer(
    name="torchtitan",
    title="a torchtitan config",
    marks=frozenset(
        """
        model.flavor training.local_batch_size training.batch_size training.seq_len
        activation_checkpoint.mode activation_checkpoint.selective_ac_option job.dump_folder
        parallelism.tensor_parallel_degree parallelism.data_parallel_shard_degree training.max_norm float8
        JobConfig Trainer.Config() JobConfig() training.max_context_length
""".split()
    ),
    read=read,
)
