"""Configurations of other tools as recipes: values of public files, the account of every field, defaults."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import trainfit
from trainfit.integrations.importers import registry, run
from trainfit.integrations.importers.run import ImportedConfig, imported
from trainfit.integrations.importers.source import read
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.quantize import Quantized
from trainfit.spec.recipe import Adapter
from trainfit.techniques.registry import check

FOLDER = Path(__file__).parents[1] / "data" / "imports"
DDP = {"parallel.strategy": "ddp"}
FSDP = {"parallel.strategy": "fsdp"}

CASES: dict[str, tuple[list[str], list[str], dict[str, Any]]] = {
    "axolotl, QLoRA of 70B over two GPUs": (
        ["axolotl/qlora-fsdp-70b.yaml"],
        ["hardware.gpu=rtx-4090", "hardware.count=2"],
        FSDP
        | {
            "model.config": "llama-3-70b",
            "batch.micro": 1,
            "batch.seq": 512,
            "batch.accumulate": 4,
            "precision": "bf16",
            "attention": "flash",
            "recompute": "full",
            "quantize.kind": "nf4",
            "quantize.library": "bitsandbytes",
            "quantize.double": True,
            "adapter.rank": 8,
            "adapter.alpha": 16,
            "adapter.targets": "all-linear",
            "optimizer.lr": 1e-5,
            "optimizer.clip_norm": 1.0,
            "hardware.count": 2,
            "parallel.reshard_after_forward": True,
        },
    ),
    "axolotl, LoRA": (
        ["axolotl/lora-1b.yaml"],
        [],
        {
            "optimizer.name": "bnb-adamw8bit",
            "data.pack": True,
            "model.weights": "NousResearch/Llama-3.2-1B",
            "model.config": "llama-3.2-1b",
            "batch.micro": 2,
            "batch.seq": 2048,
            "batch.accumulate": 2,
            "precision": "bf16",
            "adapter.rank": 16,
            "adapter.alpha": 32,
            "adapter.dropout": 0.05,
            "adapter.dtype": "fp32",
            "quantize": None,
            "hardware.count": 1,
            "adapter.targets": ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"),
        },
    ),
    "axolotl, every weight, paged": (
        ["axolotl/fft-8b.yaml"],
        [],
        {
            "optimizer.name": "paged-adamw8bit",
            "model.config": "llama-3.1-8b",
            "batch.seq": 8192,
            "batch.accumulate": 8,
            "precision": "bf16",
            "adapter": None,
            "recompute": "full",
        },
    ),
    "axolotl, 7B": (
        ["axolotl/mistral-7b.yaml"],
        ["hardware.count=4"],
        DDP
        | {
            "attention": "sdpa",
            "data.pack": True,
            "model.config": "mistral-7b-v0.1",
            "batch.micro": 2,
            "batch.seq": 8192,
            "optimizer.lr": 5e-6,
        },
    ),
    "axolotl, pairs": (
        ["axolotl/dpo-qwen2.5-0.5b.yaml"],
        [],
        {"model.config": "qwen2.5-0.5b", "batch.micro": 2, "adapter": None, "objective.name": "dpo"},
    ),
    "axolotl, pairs, LoRA over 8 bits": (
        ["axolotl/dpo-lora-8b.yaml"],
        [],
        {"model.config": "llama-3-8b", "batch.micro": 2, "quantize.kind": "int8", "adapter.rank": 32},
    ),
    "LLaMA-Factory, LoRA, its defaults": (
        ["llama-factory/qwen3_lora_sft.yaml"],
        [],
        {
            "model.config": "qwen3-4b",
            "batch.micro": 1,
            "batch.accumulate": 8,
            "batch.seq": 2048,
            "precision": "bf16",
            "recompute": "full",
            "adapter.rank": 8,
            "adapter.alpha": 16,
            "adapter.targets": "all-linear",
            "optimizer.weight_decay": 0.0,
            "loader.workers": 4,
        },
    ),
    "LLaMA-Factory, every weight, and the DeepSpeed file that it names": (
        ["llama-factory/qwen3_full_sft.yaml"],
        ["hardware.count=8"],
        {
            "precision": "bf16-master",
            "model.config": "qwen3-4b",
            "adapter": None,
            "parallel.strategy": "fsdp",
            "recompute": "full",
        },
    ),
    "LLaMA-Factory, QLoRA, with accelerate's FSDP": (
        ["llama-factory/fsdp_qlora.yaml", "accelerate/fsdp.yaml"],
        [],
        FSDP
        | {"model.config": "llama-3-8b", "quantize.kind": "nf4", "hardware.count": 2, "precision": "bf16"},
    ),
    "LLaMA-Factory, pairs": (
        ["llama-factory/qwen3_lora_dpo.yaml"],
        [],
        {"batch.micro": 1, "batch.seq": 2048, "objective.beta": 0.1, "objective.loss": "sigmoid"},
    ),
    "LLaMA-Factory, second layout": (
        ["llama-factory/v1-quantization.yaml"],
        ["hardware.count=2"],
        FSDP
        | {"model.config": "qwen3-0.6b", "quantize.kind": "nf4", "adapter.alpha": 32, "recompute": "full"},
    ),
    "torchtune, every weight on one GPU": (
        ["torchtune/1B_full_single_device.yaml"],
        [],
        {
            "optimizer.name": "paged-adamw8bit",
            "model.weights": "random",
            "model.config": "llama-3.2-1b",
            "batch.micro": 4,
            "precision": "bf16",
            "loss": "chunked",
            "optimizer.in_backward": True,
            "recompute": "none",
        },
    ),
    "torchtune, QLoRA": (
        ["torchtune/8B_qlora_single_device.yaml"],
        [],
        {
            "model.config": "llama-3.1-8b",
            "quantize.kind": "nf4",
            "adapter.rank": 8,
            "adapter.dtype": "base",
            "adapter.targets": ("down_proj", "gate_proj", "o_proj", "q_proj", "up_proj", "v_proj"),
            "batch.accumulate": 8,
            "optimizer.implementation": "fused",
            "recompute": "full",
        },
    ),
    "torchtune, 70B over eight GPUs": (
        ["torchtune/70B_full.yaml"],
        ["hardware.count=8"],
        FSDP | {"model.config": "llama-3.1-70b", "optimizer.implementation": "foreach", "precision": "bf16"},
    ),
    "torchtune, paged AdamW": (
        ["torchtune/7B_full_single_device.yaml"],
        [],
        {"optimizer.name": "paged-adamw", "model.config": "qwen2.5-7b", "batch.micro": 2},
    ),
    "torchtitan, TOML": (
        ["torchtitan/debug_model.toml"],
        ["hardware.count=8"],
        FSDP
        | {
            "batch.micro": 8,
            "batch.seq": 2048,
            "precision": "mixed-bf16",
            "recompute.every": 2,
            "optimizer.lr": 8e-4,
            "optimizer.weight_decay": 0.1,
            "optimizer.clip_norm": 1.0,
            "model.config.num_hidden_layers": 6,
            "model.config.vocab_size": 2048,
        },
    ),
    "torchtitan, TOML, one GPU computes under autocast": (
        ["torchtitan/debug_model.toml"],
        [],
        {"precision": "amp-bf16", "hardware.count": 1},
    ),
    "torchtitan, tensor parallelism": (
        ["torchtitan/llama3_70b.toml"],
        ["hardware.count=64"],
        {
            "model.config": "llama-3.1-70b",
            "parallel.tensor": 8,
            "hardware.count": 64,
            "recompute": "full",
            "precision": "mixed-bf16",
            "optimizer.lr": 1.5e-4,
        },
    ),
    "torchtitan, JobConfig": (
        ["torchtitan/llama3_8b.py"],
        ["hardware.count=8"],
        {"model.config": "llama-3.1-8b", "batch.micro": 1, "batch.seq": 8192, "precision": "mixed-bf16"},
    ),
    "torchtitan, a function's Trainer.Config": (
        ["torchtitan/llama3/config_registry.py:llama3_8b"],
        ["hardware.count=8"],
        {
            "recompute.selective": {"save": ["attention", "mm"], "every": 2},
            "model.config": "llama-3.1-8b",
            "batch.micro": 1,
            "batch.seq": 8192,
            "loss": "chunked",
            "compile": False,
        },
    ),
    "torchtitan, a function that changes another's": (
        ["torchtitan/llama3/config_registry.py:llama3_8b_compiled"],
        ["hardware.count=8"],
        {
            "compile": "block",
            "recompute": "full",
            "parallel.tensor": 2,
            "batch.seq": 8192,
            "optimizer.lr": 3e-4,
        },
    ),
    "TRL, YAML, QLoRA": (
        ["trl/zephyr_sft_qlora.yaml"],
        [],
        {
            "model.config": "mistral-7b-v0.1",
            "batch.micro": 4,
            "batch.seq": 2048,
            "precision": "bf16",
            "quantize.kind": "nf4",
            "quantize.double": False,
            "attention": "flash",
            "adapter.rank": 16,
        },
    ),
    "TRL, YAML, pairs, fp32 weights by default": (
        ["trl/zephyr_dpo_full.yaml", "accelerate/fsdp2.yaml"],
        [],
        FSDP
        | {
            "batch.micro": 8,
            "batch.seq": 1024,
            "precision": "mixed-bf16",
            "hardware.count": 8,
            "objective.name": "dpo",
            "objective.beta": 0.01,
        },
    ),
    "TRL, a script": (
        ["trl/sft_script.py"],
        [],
        {
            "model.config": "smollm-135m",
            "batch.micro": 2,
            "batch.accumulate": 4,
            "batch.seq": 512,
            "precision": "bf16",
            "quantize.compute": "bf16",
            "quantize.double": True,
            "adapter.rank": 16,
            "adapter.targets": "all-linear",
            "optimizer.lr": 2e-4,
            "recompute": "full",
        },
    ),
    "TrainingArguments, DeepSpeed and a model": (
        ["trl/training_args.json", "deepspeed/ds_z3_config.json"],
        ["hardware.count=4"],
        {
            "precision": "bf16-master",
            "optimizer.no_decay": ("norms", "biases"),
            "model.config": "qwen3-0.6b",
            "batch.micro": 4,
            "batch.accumulate": 2,
            "parallel.strategy": "fsdp",
        },
    ),
    "TrainingArguments, accelerate": (
        ["trl/training_args.json", "accelerate/multi_gpu.yaml"],
        [],
        DDP | {"hardware.count": 8, "precision": "bf16"},
    ),
    "accelerate's ZeRO": (
        ["trl/training_args.json", "accelerate/zero3.yaml"],
        [],
        FSDP | {"hardware.count": 8},
    ),
    "DeepSpeed alone, ZeRO-2": (
        ["deepspeed/zero_stage2_offload_config.json"],
        ["hardware.count=2"],
        {"parallel.reshard_after_forward": False, "batch.accumulate": 1},
    ),
    "PEFT's adapter": (
        ["peft/adapter_config.json"],
        [],
        {
            "model.config": "llama-3.2-1b",
            "adapter.rank": 16,
            "adapter.alpha": 32,
            "adapter.targets": ("q_proj", "v_proj"),
        },
    ),
    "PEFT's adapter with TrainingArguments": (
        ["trl/training_args.json", "peft/adapter_config.json"],
        [],
        {"model.config": "llama-3.2-1b", "batch.micro": 4},
    ),
}


def model_of(files: list[str]) -> str | None:
    """Return a model for files that name none."""
    named = ("axolotl", "llama-factory", "torchtune", "torchtitan", "trl/zephyr", "trl/sft", "peft")
    return None if any(one.startswith(named) for one in files) else "qwen3-0.6b"


def imported_case(name: str) -> ImportedConfig:
    files, settings, _ = CASES[name]
    return imported([str(FOLDER / one) for one in files], settings, model_of(files))


def value_at(content: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        if not isinstance(content, Mapping):
            return content
        content = content[part]
    return tuple(content) if isinstance(content, list) else content


@pytest.mark.parametrize("name", CASES)
def test_a_public_config_becomes_the_recipe(name: str) -> None:
    found = imported_case(name)
    content = found.recipe.content()
    if found.recipe.base is not None:
        content["quantize"] = found.recipe.base.model_dump()
    got = {
        field: value_at(content, field.replace("model.config.", "model.config.")) for field in CASES[name][2]
    }
    assert got == CASES[name][2]
    assert recipe_from(trainfit.load_recipe(found.recipe).content()).id == found.recipe.id


@pytest.mark.parametrize("name", CASES)
def test_every_field_is_accounted_for(name: str) -> None:
    """Each leaf of each file, or a mapping around it, stands in exactly one of the lists."""
    files, _, _ = CASES[name]
    found = imported_case(name)
    lists = [
        {one.name for one in found.taken},
        {one.name for one in found.without},
        {*found.idle},
        {*found.blank},
        {one.name for one in found.unread},
    ]
    assert sum(map(len, lists)) == found.num_fields or lists[0] & lists[1]
    listed = set().union(*lists)
    for index, file in enumerate(files):
        if file.endswith((".py", "llama3_8b", "llama3_8b_compiled")):
            continue
        prefix = "" if index == 0 else f"{Path(file).name}: "
        for leaf in leaves(read(str(FOLDER / file)).values):
            parts = leaf.split(".")
            around = {f"{prefix}{'.'.join(parts[:count])}" for count in range(1, len(parts) + 1)}
            assert around & listed, f"{leaf} of {file} is in no list"


def leaves(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, value in values.items():
        found += (
            leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else [f"{prefix}{name}"]
        )
    return found


@pytest.mark.parametrize("name", CASES)
def test_nothing_in_the_public_configs_is_unknown(name: str) -> None:
    assert imported_case(name).unread == ()


def test_what_is_lost_is_named_with_what_it_would_change() -> None:
    found = {one.name: one for one in imported_case("axolotl, QLoRA of 70B over two GPUs").without}
    lost = found["fsdp_config.fsdp_offload_params"]
    assert lost.changes == ("memory", "time")
    assert "host memory" in lost.note
    found = {one.name: one for one in imported_case("TRL, YAML, pairs, fp32 weights by default").without}
    assert "ref_model" not in found  # Its forward and weights are part of the recipe.
    assert "memory" in found["per_device_eval_batch_size"].changes


def test_what_shards_cannot_have_is_the_nearest() -> None:
    """bitsandbytes' states do not follow shards here: torchao's 8-bit states stand for them."""
    found = imported([str(FOLDER / "axolotl/lora-1b.yaml"), str(FOLDER / "accelerate/fsdp2.yaml")])
    assert found.recipe.optimizer.name == "adamw8bit"
    assert [one.name for one in found.without] == ["optimizer"]


def test_a_window_that_flash_attention_cuts_is_a_mask_here() -> None:
    found = {one.name: one for one in imported_case("axolotl, 7B").without}
    assert "window" in found["attn_implementation"].note


def test_without_bitsandbytes_the_nearest_optimizer_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = imported_case("axolotl, every weight, paged").recipe
    monkeypatch.setattr(run, "is_installed", lambda package: False)
    changed, note = run.predictable(recipe)
    assert changed.optimizer.name == "adamw8bit"
    assert "bitsandbytes is missing" in note
    monkeypatch.setattr(run, "is_installed", lambda package: True)
    assert run.predictable(recipe) == (recipe, "")


def test_a_file_that_a_field_names_is_read() -> None:
    found = imported_case("LLaMA-Factory, every weight, and the DeepSpeed file that it names")
    assert [one.tool for one in found.files] == ["llama-factory", "deepspeed"]


def test_a_file_that_is_not_there_is_judged_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "base_model: Qwen/Qwen3-0.6B\nmicro_batch_size: 1\nsequence_len: 256\n"
        "deepspeed: deepspeed_configs/zero2.json\n"
    )
    found = imported([str(file)], ["hardware.count=2"])
    assert found.recipe.parallel.reshard_after_forward is False
    assert any("not here" in one.note for one in found.assumed)


def test_defaults_of_the_tools_are_named() -> None:
    assumed = {one.field: one.value for one in imported_case("PEFT's adapter with TrainingArguments").assumed}
    assert assumed["batch.seq"] == 1024
    found = imported_case("LLaMA-Factory, LoRA, its defaults")
    assumed = {one.field: one.value for one in found.assumed}
    assert {"adapter.alpha", "optimizer.name", "hardware.count", "recompute"} <= assumed.keys()


def test_the_user_comes_first() -> None:
    path = str(FOLDER / "axolotl/lora-1b.yaml")
    found = trainfit.import_config(path, model="smollm-135m", gpu="l4", count=2, set=["batch.seq=128"])
    recipe = found.recipe
    assert (recipe.model.config, recipe.hardware.gpu, recipe.hardware.count) == ("smollm-135m", "l4", 2)
    assert recipe.batch.seq == 128


def test_a_models_config_may_be_among_the_files(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, '
        '"intermediate_size": 128, "vocab_size": 256}'
    )
    found = imported([str(FOLDER / "trl/training_args.json"), str(config)])
    assert isinstance(found.recipe.model.config, dict)
    assert found.recipe.model.config["hidden_size"] == 64


def test_a_folder_of_a_model_is_found_next_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, '
        '"intermediate_size": 128, "vocab_size": 256}'
    )
    (tmp_path / "run.yaml").write_text("base_model: mine\nmicro_batch_size: 1\nsequence_len: 256\n")
    assert imported([str(tmp_path / "run.yaml")]).recipe.model.display_name == "mine"


@pytest.mark.parametrize(
    ("config", "adapter"),
    [
        (
            {"peft_type": "P_TUNING", "encoder_reparameterization_type": "LSTM", "encoder_hidden_size": 32,
             "encoder_num_layers": 2, "encoder_dropout": 0.0},
            {"kind": "p-tuning", "reparametrization": "lstm", "encoder_hidden_size": 32},
        ),
        ({"peft_type": "P_TUNING", "encoder_reparameterization_type": "MLP"}, {"kind": "p-tuning"}),
        (
            {"peft_type": "PREFIX_TUNING", "prefix_projection": True, "encoder_hidden_size": 16},
            {"kind": "prefix", "reparametrization": "mlp", "encoder_hidden_size": 16},
        ),
        # PEFT writes a width that it does not use.
        (
            {"peft_type": "PREFIX_TUNING", "prefix_projection": False, "encoder_hidden_size": 32},
            {"kind": "prefix"},
        ),
    ],
    ids=["lstm", "mlp", "prefix by an mlp", "prefix"],
)  # fmt: skip
def test_layers_of_pefts_virtual_tokens(
    config: dict[str, Any], adapter: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"token_dim": 64, "num_layers": 2, "num_attention_heads": 4, "num_transformer_submodules": 1}
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**config, **sizes, "num_virtual_tokens": 5, "inference_mode": True}))
    found = imported([str(file)], model="llama-3.2-1b")
    assert found.recipe.adapter == Adapter(tokens=5, **adapter)
    assert not found.unread


def test_unknown_fields_are_named_not_dropped(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("base_model: gpt2\nmicro_batch_size: 1\nsequence_len: 256\ncontext_parapllel_size: 2\n")
    found = imported([str(file)])
    assert [(one.name, one.given) for one in found.unread] == [("context_parapllel_size", 2)]
    assert "context_parapllel_size = 2" in found.text(width=80)


def test_a_value_that_is_no_literal_is_named(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "import os\nfrom transformers import TrainingArguments, AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2')\n"
        "args = TrainingArguments('out', per_device_train_batch_size=int(os.environ['B']),\n"
        "                         learning_rate=1e-4, weight_decay=decay())\n"
    )
    found = imported([str(file)])
    names = ["per_device_train_batch_size", "weight_decay"]
    assert [one.name for one in found.unread] == [f"TrainingArguments.{name}" for name in names]
    assert found.recipe.batch.micro == 8
    assert found.recipe.optimizer.lr == 1e-4


UNSLOTH = """
max_seq_length = 2048
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/Meta-Llama-3.1-8B-bnb-4bit", max_seq_length=max_seq_length, load_in_4bit=True
)
model = FastLanguageModel.get_peft_model(
    model, r=16, lora_alpha=16, target_modules=["q_proj", "v_proj"], use_gradient_checkpointing="unsloth"
)
SFTConfig(per_device_train_batch_size=2, fp16=not is_supported(), bf16=is_supported(), output_dir="out")
"""


def test_unsloths_words_are_read(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(UNSLOTH)
    found = imported([str(file)])
    recipe = found.recipe
    assert recipe.base is not None
    assert (recipe.model.config, recipe.batch.seq, recipe.base.kind) == ("llama-3.1-8b", 2048, "nf4")
    assert recipe.offload.activations
    assert sorted(one.name for one in found.unread) == ["SFTConfig.bf16", "SFTConfig.fp16"]


def test_nothing_in_a_script_runs(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom trl import SFTConfig\n"
        f"SFTConfig(output_dir=open({str(tmp_path / 'ran')!r}, 'w').name, max_length=64)\n"
    )
    assert imported([str(file)], model="gpt2").recipe.batch.seq == 64
    assert not (tmp_path / "ran").exists()


def test_text_fits_80_columns() -> None:
    for name in ("axolotl, QLoRA of 70B over two GPUs", "LLaMA-Factory, QLoRA, with accelerate's FSDP"):
        text = imported_case(name).text(width=80)
        assert max(map(len, text.splitlines())) <= 80


def test_an_importer_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mytool.py").write_text(
        "from trainfit.integrations.importers.base import Importer\n"
        "def read(reading):\n"
        "    reading.know('model', reading.text('net'), 'net')\n"
        "    reading.take('rows', 'batch.micro', reading.whole('rows'))\n"
        "    reading.finish()\n"
        "IMPORTER = Importer(\n"
        "    name='mytool', title='a mytool config', marks=frozenset({'net', 'rows'}), read=read\n"
        ")\n"
    )
    info = tmp_path / "mytool-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mytool\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\nmytool = mytool:IMPORTER\n")
    file = tmp_path / "run.yaml"
    file.write_text("net: gpt2\nrows: 3\nother: 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry.importers.cache_clear()
    try:
        found = imported([str(file)])
    finally:
        registry.importers.cache_clear()
    assert (found.files[0].tool, found.recipe.batch.micro) == ("mytool", 3)
    assert [one.name for one in found.unread] == ["other"]


def test_two_main_files_are_refused() -> None:
    paths = [str(FOLDER / one) for one in ("axolotl/lora-1b.yaml", "torchtune/70B_full.yaml")]
    with pytest.raises(InputError, match="import them one by one"):
        imported(paths)


def of_script(folder: Path, *lines: str, settings: tuple[str, ...] = ()) -> ImportedConfig:
    (folder / "train.py").write_text("\n".join(lines))
    return imported([str(folder / "train.py")], settings)


def test_adafactor_of_the_trainer_has_absolute_steps(tmp_path: Path) -> None:
    """The Trainer passes scale_parameter=False and relative_step=False, whatever ``optim_args`` says."""
    model = "AutoModelForCausalLM.from_pretrained('gpt2')"
    for word, absolute in (("adafactor", True), ("adamw_torch", False)):
        optimizer = of_script(tmp_path, model, f"SFTConfig(optim={word!r}, max_length=64)").recipe.optimizer
        assert optimizer.scale_parameter is not absolute
        assert (optimizer.name, optimizer.implementation) == (
            ("adafactor", "forloop") if absolute else ("adamw", "foreach")
        )


def test_variants_of_lora_are_values(tmp_path: Path) -> None:
    lora = "LoraConfig(use_dora=True, use_rslora=True, modules_to_save=['lm_head'], r=4)"
    model = "AutoModelForCausalLM.from_pretrained('gpt2')"
    adapter = of_script(tmp_path, "SFTConfig(max_length=64)", model, lora).recipe.adapter
    assert adapter is not None
    assert (adapter.dora, adapter.rslora, adapter.modules_to_save) == (True, True, ("lm_head",))
    assert adapter.targets == ("c_attn",)


@pytest.mark.parametrize(
    ("arguments", "autocast", "expected"),
    [
        ("", False, {"double": False, "compute": "fp32"}),
        ("", True, {"double": False}),
        ("bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype='bfloat16'", False, {"compute": "bf16"}),
        ("llm_int8_skip_modules=['lm_head', 'q_proj']", True, {"double": False, "skip_modules": ("q_proj",)}),
    ],
)
def test_bitsandbytes_defaults_are_those_of_transformers(
    arguments: str, autocast: bool, expected: dict[str, Any], tmp_path: Path
) -> None:
    """No second quantisation, and products in fp32 but under autocast."""
    found = of_script(
        tmp_path, f"SFTConfig(max_length=64, bf16={autocast})", "LoraConfig(r=4)",
        "AutoModelForCausalLM.from_pretrained('gpt2')", f"BitsAndBytesConfig(load_in_4bit=True, {arguments})",
    )  # fmt: skip
    assert found.recipe.base == Quantized(kind="nf4", library="bitsandbytes", **expected)
    assert found.without == ()


@pytest.mark.parametrize(
    ("words", "count", "expected"),
    [
        ("optim: adamw_torch", 1, ("bf16-master", "adamw", "fused")),
        ("optim: adamw_torch", 2, ("bf16-master", "adamw", "foreach")),
        ("optim: adamw_bnb_8bit", 1, ("amp-bf16", "bnb-adamw8bit", "fused")),
        ("optim: adamw_bnb_8bit", 2, ("bf16-master", "adamw8bit", "fused")),
        ("optim: sgd", 2, ("bf16-master", "sgd", "foreach")),
    ],
)
def test_what_master_weights_and_shards_exclude_is_the_nearest(
    words: str, count: int, expected: tuple[str, str, str], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(
        f"per_device_train_batch_size: 1\nbf16: true\n{words}\n"
        "deepspeed: {zero_optimization: {stage: 3}}\n"
    )
    recipe = imported([str(tmp_path / "run.yaml")], [f"hardware.count={count}"], "smollm-135m").recipe
    assert (recipe.precision, recipe.optimizer.name, recipe.optimizer.implementation) == expected


@pytest.mark.parametrize(("count", "is_host"), [(1, True), (2, False)])
def test_host_memory_of_the_optimizer_is_that_of_one_gpu(count: int, is_host: bool) -> None:
    files = [
        str(FOLDER / one) for one in ("trl/training_args.json", "deepspeed/zero_stage2_offload_config.json")
    ]
    found = imported(files, [f"hardware.count={count}"], "qwen3-0.6b")
    assert found.recipe.offload.optimizer is is_host
    assert any("offload_optimizer" in one.name for one in found.without) is not is_host


def test_states_of_weights_that_train_wait_on_the_host_of_one_gpu() -> None:
    files = [str(FOLDER / one) for one in ("trl/training_args.json", "deepspeed/ds_z3_offload_config.json")]
    found = imported(files, ["hardware.count=1"], "qwen3-0.6b")
    assert (found.recipe.offload.weights, found.recipe.offload.optimizer) == (False, True)
    assert any("offload_param" in one.name and "weights on the GPU" in one.note for one in found.without)


@pytest.mark.parametrize(
    ("fields", "expected", "left"),
    [
        ("", {"name": "dpo"}, []),
        ("beta=0.3, loss_type=['hinge'], use_liger_kernel=True",
         {"name": "dpo", "beta": 0.3, "loss": "hinge"}, []),
        ("loss_type='apo_zero'", {"name": "dpo"}, ["DPOConfig.loss_type"]),
        ("reference_free=True", {"name": "dpo", "reference": "none"}, []),
        ("precompute_ref_log_probs=True", {"name": "dpo"}, ["DPOConfig.precompute_ref_log_probs"]),
    ],
)  # fmt: skip
def test_dpo_of_trl_is_the_objective(
    fields: str, expected: dict[str, Any], left: list[str], tmp_path: Path
) -> None:
    (tmp_path / "run.py").write_text(
        f"args = DPOConfig(output_dir='x', per_device_train_batch_size=4, {fields})\n"
    )
    found = imported([str(tmp_path / "run.py")], model="gpt2")
    assert found.recipe.objective.model_dump(exclude_defaults=True) == expected
    assert found.recipe.batch.micro == 4  # Of pairs, as TRL counts.
    assert [one.name for one in found.without] == left
    check(found.recipe)


AXOLOTL = "base_model: gpt2\nmicro_batch_size: 4\nsequence_len: 128\nsample_packing: false\n"
FACTORY = "model_name_or_path: gpt2\nstage: dpo\nfinetuning_type: full\nper_device_train_batch_size: 4\n"
TUNE = (
    "model:\n  _component_: torchtune.models.llama3_2.lora_llama3_2_1b\n  lora_attn_modules: [q_proj]\n"
    "tokenizer:\n  max_seq_len: 128\nbatch_size: 4\nloss:\n  _component_: torchtune.rlhf.loss."
)


@pytest.mark.parametrize(
    ("text", "expected", "pairs", "left"),
    [
        (AXOLOTL + "rl: dpo\nrl_beta: 0.3\ndpo_label_smoothing: 0.1\n",
         {"name": "dpo", "beta": 0.3, "label_smoothing": 0.1}, 4, []),
        (AXOLOTL + "rl: ipo\nrl_beta: 0.3\ntrl: {beta: 0.2}\n",
         {"name": "dpo", "beta": 0.2, "loss": "ipo"}, 4, []),
        (AXOLOTL + "rl: dpo\nrpo_alpha: 0.5\n", {"name": "dpo"}, 4, ["rpo_alpha"]),
        (AXOLOTL + "rl: simpo\n", {"name": "pretrain"}, 8, ["rl"]),
        (FACTORY + "pref_loss: hinge\npref_beta: 0.05\n",
         {"name": "dpo", "beta": 0.05, "loss": "hinge"}, 4, []),
        (FACTORY + "pref_loss: orpo\n", {"name": "pretrain"}, 8, ["stage"]),
        (FACTORY + "pref_ftx: 0.2\nref_model: gpt2\n", {"name": "dpo"}, 4, ["pref_ftx", "ref_model"]),
        (TUNE + "DPOLoss\n  beta: 0.05\n  label_smoothing: 0.1\nref_checkpointer: {}\n",
         {"name": "dpo", "beta": 0.05, "label_smoothing": 0.1}, 4, []),
        (TUNE + "RSOLoss\n  gamma: 0.2\n", {"name": "dpo", "beta": 0.2, "loss": "hinge"}, 4, []),
        (TUNE + "SimPOLoss\n", {"name": "pretrain"}, 8, ["loss._component_"]),
    ],
)  # fmt: skip
def test_preferences_of_other_tools(
    text: str, expected: dict[str, Any], pairs: int, left: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    found = imported([str(tmp_path / "config.yaml")])
    chosen = found.recipe.objective.model_dump(exclude_defaults=True)
    assert (chosen or {"name": "pretrain"}) == expected
    assert found.recipe.batch.micro == pairs
    assert [one.name for one in found.without] == left
    check(found.recipe)


@pytest.mark.parametrize(
    ("call", "lr", "seq"),
    [
        ("SFTConfig(output_dir='x')", 2e-5, 1024),
        ("DPOConfig(output_dir='x')", 1e-6, 1024),
        ("RewardConfig(output_dir='x', max_length=300)", 1e-4, 300),
        ("GRPOConfig(output_dir='x')", 1e-6, 1024),
        ("OnlineDPOConfig(output_dir='x')", 5e-7, 512),
        ("GKDConfig(output_dir='x', max_length=2048)", 2e-5, 2048),
        ("TrainingArguments(output_dir='x')", 5e-5, 1024),
    ],
)
def test_each_config_of_trl_has_its_own_defaults(call: str, lr: float, seq: int, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(f"args = {call}\n")
    recipe = imported([str(tmp_path / "run.py")], model="gpt2").recipe
    assert (recipe.optimizer.lr, recipe.batch.seq) == (lr, seq)


@pytest.mark.parametrize(
    ("file", "text", "decay"),
    [
        ("ds.json", '{"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0}}}', 0.0),
        ("ds.json", '{"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.05}}}', 0.05),
        ("tune.yaml", "optimizer: {_component_: torch.optim.SGD, lr: 0.1}", 0.0),
        ("tune.yaml", "optimizer: {_component_: torch.optim.AdamW, lr: 0.1}", 0.01),
    ],
)
def test_no_decay_is_not_the_default_decay(file: str, text: str, decay: float, tmp_path: Path) -> None:
    (tmp_path / file).write_text(text)
    recipe = imported([str(tmp_path / file)], settings=["batch.micro=1"], model="gpt2").recipe
    assert recipe.optimizer.weight_decay == decay


@pytest.mark.parametrize(
    ("stage", "count", "optimizer", "precision"),
    [
        (2, 1, "AdamW", "fp16-master"),
        (0, 2, "AdamW", "fp16-master"),
        (1, 2, "AdamW", "fp16-master"),
        (2, 2, "AdamW", "bf16-master"),  # FSDP2 gathers in bf16 here.
        (1, 1, "Adafactor", "amp-fp16"),
    ],
)
def test_fp16_of_deepspeed_keeps_master_weights(
    stage: int, count: int, optimizer: str, precision: str, tmp_path: Path
) -> None:
    file = tmp_path / "ds.json"
    content = {
        "fp16": {"enabled": True}, "zero_optimization": {"stage": stage}, "optimizer": {"type": optimizer},
        "train_micro_batch_size_per_gpu": 1,
    }  # fmt: skip
    file.write_text(json.dumps(content))
    found = imported([str(file)], [f"hardware.count={count}"], "gpt2")
    assert found.recipe.precision == precision
    assert ("fp16.enabled" in [one.name for one in found.without]) is (precision != "fp16-master")


@pytest.mark.parametrize(
    ("kind", "more", "precision"),
    [("lora", "", "fp16-pure"), ("lora", "quantization_bit: 4", "fp16-pure"), ("full", "", "amp-fp16")],
)
def test_a_frozen_base_in_fp16_has_16_bits(kind: str, more: str, precision: str, tmp_path: Path) -> None:
    """The base is loaded in fp16, and weights that train in fp32."""
    file = tmp_path / "train.yaml"
    file.write_text(
        f"model_name_or_path: gpt2\nstage: sft\nfinetuning_type: {kind}\nfp16: true\n"
        f"cutoff_len: 64\nper_device_train_batch_size: 1\n{more}\n"
    )
    assert imported([str(file)]).recipe.precision == precision
