"""Ask pre-flight estimators from PyPI about the recipes that were measured on an H200.

    pip install --no-deps --target FOLDER fitcheck-llm==0.3.1 ftuneai==0.4.1 canifinetune==0.4.1 \\
        fitscout==0.1.1 platformdirs
    PYTHONPATH=$PYTHONPATH:FOLDER python -m evidence.scripts.estimators OUT.jsonl

writes a line a recipe and estimator that can express it. An estimator
is told what the recipe states, and the exact number of parameters; what it has no input for, it assumes. It
is not asked about what its own inputs cannot say: custom kernels and losses, compilation, offload, autocast.
"""

# pyright: reportMissingImports=false, reportPrivateUsage=false
import argparse
import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from evidence.scripts.tables.estimators import measured
from trainfit.catalog.load import gpu, model_config
from trainfit.report.compare import Comparison
from trainfit.spec.printable import say
from trainfit.spec.recipe import Adapter, LossTerms, Offload, Recipe
from trainfit.spec.units import GIB, MIB

CARD = "h200"
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED_ATTENTION = ("sdpa", "flash", "cudnn", "efficient")


class Answer(NamedTuple):
    """What an estimator prints: bytes on the device, and whether that fits by its own rule."""

    num_bytes: float
    fits: bool


class Question(NamedTuple):
    """A recipe as its measurement found it."""

    recipe: Recipe
    config: dict[str, Any]
    params: int
    """Of the base model."""

    @property
    def is_full(self) -> bool:
        return self.recipe.adapter is None

    @property
    def targets(self) -> tuple[str, ...]:
        adapter = self.recipe.adapter
        if adapter is None or adapter.targets == "all-linear":
            return LINEARS
        return tuple(adapter.targets)

    @property
    def dtype_bytes(self) -> int:
        return 4 if self.recipe.precision == "fp32" else 2

    @property
    def optimizer(self) -> str:
        return self.recipe.optimizer.name

    def first(self, *keys: str, default: int = 0) -> int:
        """Return the config's first value of several keys."""
        return next((int(self.config[key]) for key in keys if self.config.get(key) is not None), default)


def question(pair: Comparison) -> Question | None:
    """Return a measured recipe as a question; None where no estimator has the inputs."""
    recipe, found = pair.recipe, pair.predicted
    assert found is not None
    optimizer, adapter = recipe.optimizer, recipe.adapter
    plain = (
        recipe.model.implementation == "hf" and recipe.hardware.count == 1 and recipe.loss == "standard"
        and not recipe.compile and recipe.block_kernels == "standard" and recipe.offload == Offload()
        and recipe.loss_terms == LossTerms() and recipe.empty_cache_every is None
        and recipe.precision in ("bf16", "fp32") and recipe.recompute in ("none", "full")
        and recipe.attention in (*FUSED_ATTENTION, "eager")
        and not optimizer.in_backward and not optimizer.stochastic_rounding
        and (adapter is None or _is_plain_lora(adapter)) and recipe.quantize in (None, "nf4", "int8")
    )  # fmt: skip
    if not plain:
        return None
    base = found.params - (found.trainable_params if adapter else 0)
    return Question(recipe, model_config(recipe.model.config), base)


def _is_plain_lora(adapter: Adapter) -> bool:
    return adapter.kind == "lora" and (
        adapter.targets == "all-linear" or not isinstance(adapter.targets, str)
    )


def fitcheck_llm(asked: Question) -> Answer | None:
    """fitcheck-llm: dense Llama-like models; always 4 more bytes a 16-bit parameter for master weights."""
    from fitcheck import config_parser as parsing
    from fitcheck.estimator import TrainingConfig, estimate
    from fitcheck.gpu_db import GPU_DB

    recipe = asked.recipe
    optimizers = {"adamw": "adamw", "adamw8bit": "adam8bit", "sgd": "sgd-nomomentum"}
    if asked.optimizer not in optimizers or (asked.optimizer == "sgd" and recipe.optimizer.momentum):
        return None
    try:
        parsing._reject_unsupported(asked.config, CARD)
        fields = parsing._parse_fields(asked.config)
        params = parsing._reconcile_param_count(CARD, asked.params, parsing._count_params(fields))
        sizes = {name: value for name, value in vars(fields).items()}
        training = TrainingConfig(
            precision=recipe.precision, quantization=recipe.quantize or "none",
            optimizer=optimizers[asked.optimizer],
            optimizer_dtype="fp32" if recipe.precision == "fp32" or recipe.adapter else "bf16",
            batch_size=recipe.batch.micro, seq_len=recipe.batch.seq, lora_targets=list(asked.targets),
            lora_rank=recipe.adapter.rank if recipe.adapter else None,
            grad_checkpoint=recipe.recompute == "full", flash_attn=recipe.attention != "eager",
            grad_accum_steps=recipe.batch.accumulate,
        )  # fmt: skip
        found = estimate(parsing.ModelConfig(name=CARD, num_params=params, **sizes), training, GPU_DB[CARD])
    except ValueError:
        return None  # It refuses the model or the combination.
    return Answer(found.total_mib * MIB, found.fits)


def ftuneai(asked: Question) -> Answer | None:
    """ftuneai: full, LoRA or QLoRA of any shape; Adam's moments in fp32."""
    from ftuneai.core import models
    from ftuneai.core.memory import MemoryEstimator
    from ftuneai.loader import get_gpu

    recipe = asked.recipe
    optimizers = {"adamw": "adamw", "adamw8bit": "adam_8bit", "sgd": "sgd", "adafactor": "adafactor"}
    targets = {frozenset(LINEARS): "all_linear", frozenset(LINEARS[:4]): "attention_all",
               frozenset({"q_proj", "v_proj"}): "attention"}  # fmt: skip
    if asked.optimizer not in optimizers or frozenset(asked.targets) not in targets:
        return None
    heads = asked.first("num_attention_heads", "n_head")
    hidden = asked.first("hidden_size", "n_embd")
    experts = asked.first("num_local_experts", "num_experts", "n_routed_experts") or None
    spec = models.ModelSpec(
        name=CARD, parameters=asked.params, hidden_size=hidden, num_attention_heads=heads,
        num_layers=asked.first("num_hidden_layers", "n_layer"),
        num_kv_heads=asked.first("num_key_value_heads", default=heads),
        intermediate_size=asked.first("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
        vocab_size=asked.first("vocab_size"), max_seq_length=2**24, is_moe=bool(experts), num_experts=experts,
        num_active_experts=asked.first("num_experts_per_tok") or None,
        default_dtype="float32" if recipe.precision == "fp32" else "bfloat16",
    )  # fmt: skip
    method = "full" if asked.is_full else "qlora" if recipe.quantize else "lora"
    training = models.TrainingConfig(
        method=models.FineTuneMethod(method),
        quantization=models.Quantization({None: "none", "nf4": "4bit", "int8": "8bit"}[recipe.quantize]),
        batch_size=recipe.batch.micro, seq_length=recipe.batch.seq,
        gradient_checkpointing=recipe.recompute == "full",
        optimizer=models.OptimizerType(optimizers[asked.optimizer]),
        lora_rank=recipe.adapter.rank if recipe.adapter else 16,
        lora_target=models.LoRATarget(targets[frozenset(asked.targets)]),
        flash_attention=recipe.attention != "eager",
    )  # fmt: skip
    needed = MemoryEstimator(spec, training).estimate().total_gb
    return Answer(needed * GIB, needed <= get_gpu("H200-141GB").vram_gb)


def canifinetune(asked: Question) -> Answer | None:
    """canifinetune: its total without the safety margin, which it reports separately; the margin decides."""
    from canifinetune.estimator import memory
    from canifinetune.estimator.model_metadata import _from_hf_config

    recipe = asked.recipe
    fused = "adamw_torch_fused" if recipe.optimizer.implementation == "fused" else "adamw_torch"
    optimizers = {"adamw": fused, "adamw8bit": "adamw_8bit", "sgd": "sgd"}
    scopes = {frozenset(LINEARS): "all_linear", frozenset(LINEARS[:4]): "attention"}
    momentum = asked.optimizer == "sgd" and recipe.optimizer.momentum
    if asked.optimizer not in optimizers or momentum or frozenset(asked.targets) not in scopes:
        return None
    metadata = _from_hf_config(CARD, asked.config, exact_total_params=asked.params)
    if metadata is None:
        return None
    kept, memory.fetch_metadata = memory.fetch_metadata, lambda *_, **__: metadata
    try:
        found = memory.estimate(memory.EstimateRequest(
            model_id=CARD, method="full" if asked.is_full else "qlora" if recipe.quantize else "lora",
            seq_len=recipe.batch.seq, micro_batch_size=recipe.batch.micro, base_dtype=recipe.precision,
            quantization=recipe.quantize or "none", optimizer=optimizers[asked.optimizer],
            lora_rank=recipe.adapter.rank if recipe.adapter else 16,
            lora_target_scope=scopes[frozenset(asked.targets)],
            gradient_checkpointing=recipe.recompute == "full",
            attention_implementation="eager" if recipe.attention == "eager" else "sdpa",
            gpu_vram_gb=gpu(CARD).usable_bytes / GIB,
        ))  # fmt: skip
    except ValueError:
        return None  # No target modules are known for the family.
    finally:
        memory.fetch_metadata = kept
    total = found.memory.total_estimated_gb - found.memory.safety_margin_gb
    return Answer(total * GIB, found.feasible != "no")


def fitscout(asked: Question) -> Answer | None:
    """fitscout: AdamW with fp32 moments and master weights; LoRA always on queries and values."""
    from fitscout.advisor.strategy import RISK_HIGH, _risk
    from fitscout.memory.estimator import estimate_memory
    from fitscout.model.introspect import extract_arch_fields
    from fitscout.model.profile import ModelProfile

    recipe = asked.recipe
    if asked.optimizer not in ("adamw", "adamw8bit") or recipe.quantize == "int8":
        return None
    fields = extract_arch_fields(asked.config)
    found = estimate_memory(
        ModelProfile(params=asked.params, dtype_bytes=asked.dtype_bytes, **fields),
        method="full" if asked.is_full else "qlora" if recipe.quantize else "lora",
        micro_batch=recipe.batch.micro, seq_len=recipe.batch.seq, grad_ckpt=recipe.recompute == "full",
        opt_8bit=asked.optimizer == "adamw8bit", grad_dtype_bytes=asked.dtype_bytes,
        lora_rank=recipe.adapter.rank if recipe.adapter else 16,
    )  # fmt: skip
    risk = _risk(found.upper_gb, gpu(CARD).usable_bytes / GIB)
    return Answer(found.total_gb * GIB, risk != RISK_HIGH)


def accelerate(asked: Question) -> Answer | None:
    """accelerate estimate-memory: "Training using Adam" of the model, whatever the batch; no adapters."""
    from accelerate.commands.estimate import estimate_training_usage

    if not asked.is_full or asked.optimizer != "adamw":
        return None
    dtype = "float32" if asked.recipe.precision == "fp32" else "float16"
    needed = max(estimate_training_usage(4 * asked.params, dtype).values())
    return Answer(needed, needed <= gpu(CARD).usable_bytes)


ESTIMATORS: dict[str, Callable[[Question], Answer | None]] = {
    "fitcheck-llm": fitcheck_llm, "ftuneai": ftuneai, "canifinetune": canifinetune, "fitscout": fitscout,
    "accelerate": accelerate,
}  # fmt: skip
"""By the name of the package on PyPI."""


def rows() -> Iterator[dict[str, Any]]:
    """Yield every estimator's answer to each measured recipe that it can express."""
    for pair in measured():
        asked = question(pair)
        for name, estimator in ESTIMATORS.items() if asked else ():
            assert asked is not None
            answer = estimator(asked)
            if answer is not None:
                yield {
                    "of": asked.recipe.id, "estimator": name, "version": version(name),
                    "num_bytes": round(answer.num_bytes), "fits": answer.fits,
                }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    into = parser.parse_args().out
    found = [json.dumps(row) for row in rows()]
    into.write_text("".join(f"{line}\n" for line in found), "utf-8")
    say(f"{into}: {len(found)} answers")
