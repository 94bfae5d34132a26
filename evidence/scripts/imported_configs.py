"""Import public configurations of other tools, and predict the recipes.

``python -m evidence.scripts.imported_configs`` writes ``evidence/records/imported-configs.jsonl``, a line for
each run of RUNS, without a GPU. It needs bitsandbytes and torchao. The files in ``tests/data/imports`` have
fields and values of public ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from trainfit.integrations.importers.run import ImportedConfig

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "data" / "imports"
RESULTS = ROOT / "evidence" / "records" / "imported-configs.jsonl"


class Run(NamedTuple):
    """A public configuration, its files, and what it leaves open."""

    origin: str
    files: tuple[str, ...]
    gpu: str
    count: int
    options: tuple[str, ...] = ()  # Settings, as the command line has them
    model: str | None = None


AXOLOTL, FACTORY, TUNE = "axolotl", "LLaMA-Factory", "torchtune"
TITAN, HANDBOOK = "torchtitan", "alignment-handbook"
RUNS = (
    Run(f"{AXOLOTL} llama-3/lora-1b", ("axolotl/lora-1b.yaml",), "rtx-4090", 1),
    Run(f"{AXOLOTL} llama-3/fft-8b", ("axolotl/fft-8b.yaml",), "h100-sxm", 1),
    Run(f"{AXOLOTL} qwen2/dpo", ("axolotl/dpo-qwen2.5-0.5b.yaml",), "l4", 1),
    Run(f"{AXOLOTL} llama-3/instruct-dpo-lora-8b", ("axolotl/dpo-lora-8b.yaml",), "a100-sxm4-80gb", 1),
    Run(f"{FACTORY} train_lora/qwen3_lora_sft", ("llama-factory/qwen3_lora_sft.yaml",), "rtx-4090", 1),
    Run(f"{FACTORY} train_lora/qwen3_lora_dpo", ("llama-factory/qwen3_lora_dpo.yaml",), "rtx-4090", 1),
    Run(f"{FACTORY} v1/train_qlora/quantization", ("llama-factory/v1-quantization.yaml",), "rtx-4090", 1),
    Run(f"{TUNE} llama3_2/1B_full_single_device", ("torchtune/1B_full_single_device.yaml",), "rtx-4090", 1),
    Run(f"{TUNE} llama3_1/8B_qlora_single_device", ("torchtune/8B_qlora_single_device.yaml",), "rtx-4090", 1),
    Run(f"{TUNE} llama3_1/70B_full", ("torchtune/70B_full.yaml",), "h100-sxm", 8),
    Run(
        f"{TUNE} qwen2_5/7B_full_single_device",
        ("torchtune/7B_full_single_device.yaml",),
        "a100-sxm4-80gb",
        1,
    ),
    Run(f"{TITAN} debug_model.toml", ("torchtitan/debug_model.toml",), "h100-sxm", 8),
    Run(f"{HANDBOOK} zephyr-7b-beta/sft/config_qlora", ("trl/zephyr_sft_qlora.yaml",), "a100-sxm4-80gb", 1),
    Run("a script in the manner of TRL's documentation", ("trl/sft_script.py",), "rtx-4090", 1),
    Run(
        "TrainingArguments, TRL multi_gpu",
        ("trl/training_args.json", "accelerate/multi_gpu.yaml"),
        "h100-sxm",
        8,
        ("batch.seq=2048",),
        "qwen3-0.6b",
    ),
    Run("PEFT adapter_config.json", ("peft/adapter_config.json",), "l4", 1),
    Run(f"{AXOLOTL} mistral/config", ("axolotl/mistral-7b.yaml",), "h100-sxm", 1),
    Run(
        "TrainingArguments, LLaMA-Factory ds_z3_config",
        ("trl/training_args.json", "deepspeed/ds_z3_config.json"),
        "h100-sxm",
        4,
        ("batch.seq=2048",),
        "qwen3-0.6b",
    ),
    Run(
        "TrainingArguments, LLaMA-Factory ds_z3_offload_config",
        ("trl/training_args.json", "deepspeed/ds_z3_offload_config.json"),
        "h100-sxm",
        2,
        ("batch.seq=2048",),
        "qwen3-0.6b",
    ),
    Run(
        "TrainingArguments, accelerate zero_stage2_offload_config",
        ("trl/training_args.json", "deepspeed/zero_stage2_offload_config.json"),
        "h100-sxm",
        2,
        ("batch.seq=2048",),
        "qwen3-0.6b",
    ),
    Run(
        "TrainingArguments, alignment-handbook zero3",
        ("trl/training_args.json", "accelerate/zero3.yaml"),
        "h100-sxm",
        8,
        ("batch.seq=2048",),
        "qwen3-0.6b",
    ),
    Run(
        f"{FACTORY} extras/fsdp_qlora, accelerate fsdp_config",
        ("llama-factory/fsdp_qlora.yaml", "accelerate/fsdp.yaml"),
        "rtx-4090",
        2,
    ),
    Run(f"{TITAN} llama3_8b.py", ("torchtitan/llama3_8b.py",), "h100-sxm", 8),
    Run(
        f"{TITAN} llama3/config_registry.py: llama3_8b",
        ("torchtitan/llama3/config_registry.py:llama3_8b",),
        "h100-sxm",
        8,
    ),
    Run(
        f"{FACTORY} train_full/qwen3_full_sft, ds_z3_config",
        ("llama-factory/qwen3_full_sft.yaml",),
        "h100-sxm",
        8,
    ),
    Run(
        f"{HANDBOOK} zephyr-7b-beta/dpo/config_full, TRL fsdp2",
        ("trl/zephyr_dpo_full.yaml", "accelerate/fsdp2.yaml"),
        "a100-sxm4-80gb",
        8,
    ),
    Run(f"{AXOLOTL} llama-3/qlora-fsdp-70b", ("axolotl/qlora-fsdp-70b.yaml",), "rtx-4090", 2),
    Run(f"{TITAN} llama3_70b.toml", ("torchtitan/llama3_70b.toml",), "a100-sxm4-80gb", 64),
)


def recipe_of(run: Run) -> ImportedConfig:
    """Return what a run's files become."""
    from trainfit.integrations.importers.run import imported

    settings = [f"hardware.gpu={run.gpu}", f"hardware.count={run.count}", *run.options]
    return imported([str(FOLDER / one) for one in run.files], settings, run.model)


def account(run: Run, found: ImportedConfig) -> dict[str, Any]:
    """Return what became of the fields of a run's files."""
    return {
        "origin": run.origin,
        "files": run.files,
        "gpu": run.gpu,
        "count": run.count,
        "recipe_id": found.recipe.id,
        "fields": found.num_fields,
        "taken": len({one.name for one in found.taken}),
        "without": [one.name for one in found.without],
        "not_in_memory": [one.name for one in found.without if "memory" in one.changes],
        "unread": [one.name for one in found.unread],
        "idle": len(found.idle),
    }


def predicted(found: ImportedConfig) -> dict[str, Any]:
    """Return the prediction of a recipe, and of which code it is."""
    from trainfit.api.calls import predict_recipe
    from trainfit.spec.provenance import commit

    estimate = predict_recipe(found.recipe)
    return {
        "peak_allocated_bytes": estimate.peak_allocated_bytes,
        "peak_device_bytes": estimate.peak_device_bytes,
        "fits": estimate.fits,
        "step_s": estimate.step_s,
        "versions": estimate.versions,
        "commit": commit(),
    }


def results() -> dict[str, dict[str, Any]]:
    """Return the recorded lines by origin."""
    lines = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    return {line["origin"]: line for line in map(json.loads, lines)}


def main() -> None:
    """Predict every run whose recipe is not recorded, and write the record in the order of RUNS."""
    done = results()
    for run in RUNS:
        found = recipe_of(run)
        kept = done.get(run.origin, {})
        figures = kept if kept.get("recipe_id") == found.recipe.id else predicted(found)
        done[run.origin] = figures | account(run, found)
        gib = done[run.origin]["peak_device_bytes"] / 2**30
        print(f"{run.origin}: {gib:.2f} GiB, fits: {done[run.origin]['fits']}", file=sys.stderr, flush=True)
        lines = [json.dumps(done[one.origin]) for one in RUNS if one.origin in done]
        RESULTS.write_text("".join(f"{line}\n" for line in lines), "utf-8")


if __name__ == "__main__":
    main()
