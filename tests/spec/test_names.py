"""Names as people type them, short forms, and the names of other tools: their meaning or the answer."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from trainfit.api.recipes import load_recipe as load
from trainfit.catalog import load as catalog
from trainfit.catalog import names
from trainfit.cli.main import main
from trainfit.models.hf import hf_config_from
from trainfit.spec.errors import InputError
from trainfit.spec.parsing import synonyms
from trainfit.spec.parsing.recipe_file import load_recipe, recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.units import read_count, read_share
from trainfit.sweeps.read import read_sweep

MODEL = {"model": {"config": "gpt2"}}


TYPED = {
    "h200": ("H200", "h200 141gb"),
    "h100-sxm": (
        "h100", "H100 80GB", "H100-80G", "80GB H100", "H100 SXM5 80GB HBM3", "h100sxm"
    ),
    "h100-pcie": ("H100 PCIe",),
    "h100-nvl": ("h100-94gb",),
    "a100-sxm4-80gb": ("A100", "A100-80G", "A100 80 GB", "NVIDIA A100-SXM4-80GB"),
    "a100-pcie-80gb": ("a100 80gb pcie",),
    "a100-sxm4-40gb": ("A100-40GB",),
    "rtx-6000-ada": ("RTX 6000 Ada", "6000 Ada", "NVIDIA RTX 6000 Ada Generation"),
    "rtx-pro-6000": ("RTX PRO 6000", "rtxpro6000", "RTX PRO 6000 Blackwell", "rtx 6000 blackwell 96GB"),
    "rtx-4090": ("RTX4090", "GeForce RTX 4090 24GB", "4090"),
    "mi300x": ("MI300X 192GB",), "t4": ("Tesla T4",), "tpu-v5e": ("TPUv5e",), "gaudi3": ("Gaudi 3",),
    "cpu": ("CPU",),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPED)
def test_a_gpu_as_people_type_it(name: str) -> None:
    for typed in TYPED[name]:
        assert catalog.gpu(typed).name == name
    assert recipe_from({**MODEL, "hardware": {"gpu": TYPED[name][0]}}).hardware.gpu == name


def test_every_own_name_of_every_gpu_is_the_gpu() -> None:
    for name, row in catalog.gpus().items():
        for text in (name, name.upper(), name.replace("-", " "), *row.device_names):
            assert names.find_gpu(text) == names.Found(name, is_full=True)
        for text in row.aliases:
            assert names.gpu_name(text) == name


@pytest.mark.parametrize(
    ("typed", "listed"),
    [
        ("A100-64GB", "a100-sxm4-40gb, a100-sxm4-80gb, a100-pcie-80gb"),
        ("H100 SXM 96GB", "h100-sxm, h100-pcie, h100-nvl"),
        ("V100 16GB", "v100-sxm2-32gb"),
        ("a10g", "a10"),
    ],
)
def test_a_gpu_that_could_be_several_lists_its_family(typed: str, listed: str) -> None:
    with pytest.raises(InputError) as caught:
        catalog.gpu(typed)
    assert (
        str(caught.value) == f"hardware.gpu = {typed!r}: no accelerator of that name; did you mean {listed}?"
    )


@pytest.mark.parametrize("typed", ["80gb", "sxm", "nvidia", "", "rtx", "pcie"])
def test_a_size_or_a_series_alone_is_no_gpu(typed: str) -> None:
    assert names.find_gpu(typed) is None


def test_what_a_short_name_leaves_out_is_noted() -> None:
    notes: list[str] = []
    recipe_from({**MODEL, "hardware": "H100"}, notes=notes)
    assert notes == [
        "hardware.gpu = 'H100' is taken as h100-sxm (NVIDIA H100 SXM5 80GB); the catalog also has "
        "h100-pcie, h100-nvl"
    ]
    assert names.gpu_note("A100") == (
        "hardware.gpu = 'A100' is taken as a100-sxm4-80gb (NVIDIA A100 SXM4 80GB); the catalog also has "
        "a100-sxm4-40gb, a100-pcie-80gb"
    )
    for full in ("H200", "h100 sxm", "NVIDIA H100 PCIe", "rtx4090", "T4 16GB"):
        assert names.gpu_note(full) is None


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("GPT2", "gpt2"), ("qwen/qwen3-8b", "qwen3-8b"), ("Qwen3-8B", "qwen3-8b"),
        ("LLAMA 3.1 8B", "llama-3.1-8b"), ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("Meta-Llama-3-8B", "llama-3-8b"), ("llama3.1-8b", "llama-3.1-8b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
    ],
)  # fmt: skip
def test_a_model_as_people_type_it(typed: str, name: str) -> None:
    recipe = recipe_from({"model": {"config": typed}})
    assert (recipe.model.config, recipe.model.display_name) == (name, name)
    assert recipe.id == recipe_from({"model": {"config": name}}).id


def test_every_model_of_the_hub_has_its_hub_name_and_no_two_share_one() -> None:
    seen: set[str] = set()
    for name, row in catalog.models().items():
        on_the_hub = row.source.url.partition("https://huggingface.co/")[2]
        if on_the_hub:
            assert on_the_hub in row.hub
        for hub in row.hub:
            assert names.find_model(hub) == names.find_model(hub.upper()) == name
            assert hub.lower() not in seen
            seen.add(hub.lower())
    assert len(seen) > 120


def test_another_owners_repository_is_not_guessed_at(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"did you mean llama-3\.1-8b"):
        catalog.model_config("someone/Llama-3.1-8B")
    assert main(["predict", "Qwen/Qwen3-9B"]) == 65
    assert "did you mean qwen3-8b" in capsys.readouterr().err


def test_a_file_of_that_name_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Qwen" / "Qwen3-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    monkeypatch.chdir(tmp_path)
    mine = recipe_from({"model": {"config": "Qwen/Qwen3-8B"}})
    assert isinstance(mine.model.config, dict)
    assert mine.model.config["hidden_size"] == 64


# What is written, and what it is short for.
SHORT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"batch": 4}, {"batch": {"micro": 4}}),
    ({"optimizer": "adamw8bit"}, {"optimizer": {"name": "adamw8bit"}}),
    ({"optimizer": "Adafactor"}, {"optimizer": {"name": "adafactor", "implementation": "forloop"}}),
    ({"adapter": "LoRA"}, {"adapter": {"kind": "lora"}}),
    ({"adapter": "P_Tuning"}, {"adapter": {"kind": "p-tuning"}}),
    ({"adapter": "QLoRA"}, {"adapter": {"kind": "lora"}, "quantize": "nf4"}),
    (
        {"adapter": {"kind": "qlora", "rank": 8}, "quantize": "int8"},
        {"adapter": {"kind": "lora", "rank": 8}, "quantize": "int8"},
    ),
    ({"batch": {"seq": "8k"}}, {"batch": {"seq": 8192}}),
    ({"adapter": "none", "quantize": "None"}, {}),
    ({"hardware": "H100"}, {"hardware": {"gpu": "h100-sxm"}}),
    ({"precision": "BF16", "attention": "Flash"}, {"precision": "bf16", "attention": "flash"}),
    ({"precision": "amp_bf16", "recompute": "Full"}, {"precision": "amp-bf16", "recompute": "full"}),
    ({"compile": "Block"}, {"compile": "block"}),
]


@pytest.mark.parametrize(("written", "full"), SHORT)
def test_a_short_form_is_the_same_recipe_with_the_same_id(
    written: dict[str, Any], full: dict[str, Any]
) -> None:
    assert recipe_from({**MODEL, **written}) == recipe_from({**MODEL, **full})
    assert recipe_from({**MODEL, **written}).id == recipe_from({**MODEL, **full}).id
    set_later = recipe_from(MODEL, [f"{field}={value}" for field, value in written.items()])
    assert set_later.id == recipe_from({**MODEL, **full}).id


def test_a_short_form_keeps_the_fields_beside_it(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(
        "model: {config: gpt2}\nbatch: {micro: 1, seq: 64}\noptimizer: adamw8bit\nadapter: lora\n"
    )
    over = tmp_path / "over.yaml"
    over.write_text("extends: base.yaml\noptimizer: {lr: 1e-3}\nadapter: {rank: 64}\nbatch: 4\n")
    recipe = load_recipe(over, ["batch=2"])
    assert (recipe.batch.micro, recipe.batch.seq) == (2, 64)
    assert (recipe.optimizer.name, recipe.optimizer.lr) == ("adamw8bit", 1e-3)
    assert recipe.adapter is not None
    assert recipe.adapter.rank == 64


def test_short_forms_and_hub_names_in_a_sweep(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        "base: openai-community/gpt2\n"
        "list: [{name: a, batch: 2}, {name: b, hardware: h100, optimizer: Muon}]\n"
        "product: {batch.seq: [32], adapter: [none, lora]}\n"
    )
    sweep = read_sweep(file)
    assert [variant.recipe.model.config for variant in sweep.variants] == ["gpt2"] * 4
    assert [variant.recipe.adapter is None for variant in sweep.variants] == [True, False] * 2
    assert {variant.recipe.hardware.gpu for variant in sweep.variants} == {"h200", "h100-sxm"}
    assert sweep.variants[0].recipe.batch.micro == 2
    assert len([note for note in sweep.notes if "is taken as h100-sxm" in note]) == 1


@pytest.mark.parametrize(
    ("setting", "answer"),
    [
        ("batch_size=4", "batch_size = 4: unknown key; here it is batch.micro"),
        ("flash_attention_2=true", "here it is attention, such as attention: flash"),
        ("attention=flash_attention_2", "here it is attention: flash"),
        ("gradient_checkpointing=true", "here it is recompute, such as recompute: full"),
        ("recompute=true", "here it is recompute: full"),
        ("4bit=true", "here it is quantize: nf4, with an adapter"),
        ("quantize=4bit", "here it is quantize: nf4"),
        ("optimizer=adamw_apex_fused", "here it is optimizer.name: adamw"),
        ("adapter.r=8", "here it is adapter.rank"),
        ("bf16=true", "here it is precision: bf16 (bf16 weights) or amp-bf16"),
        ("packing=true", "here it is data.pack"),
        (
            "lr_scheduler_type=cosine",
            "here it is no field of a recipe, but an option: trainfit train --schedule",
        ),
        ("assistant_only_loss=true", "here it is data.answers_only"),
        ("deepspeed=ds.json", "here it is parallel.strategy: zero1 for ZeRO-1"),
        ("parallel=zero2", "here it is parallel: {reshard_after_forward: false}, with hardware.count"),
        ("parallel=zero3", "here it is parallel: {strategy: fsdp}, with hardware.count"),
        ("parallel.strategy=zero-3", "here it is parallel.strategy: fsdp"),
        ("dora=true", "here it is adapter.dora"),
        ("use_rslora=true", "here it is adapter.rslora"),
        ("lora_modules_to_save=[lm_head]", "here it is adapter.modules_to_save"),
        ("quantize=bitsandbytes", "here it is quantize: bnb-nf4, or bnb-nf4-dq with double quantisation"),
        ("learning-rate=1", "here it is optimizer.lr"),
        ("LEARNING_RATE=1", "here it is optimizer.lr"),
    ],
)
def test_names_of_other_tools_are_answered_with_ours(setting: str, answer: str) -> None:
    with pytest.raises(InputError) as caught:
        recipe_from({**MODEL, "adapter": {"kind": "lora"}}, [setting])
    assert answer in str(caught.value)


def test_every_answer_names_fields_and_values_that_there_are() -> None:
    fields, values = synonyms.synonyms()["fields"], synonyms.synonyms()["values"]
    every = [key for keys in fields.values() for key in keys]
    assert len(every) == len(set(every)), [key for key in every if every.count(key) > 1]
    assert len(every) > 150
    for here in fields:
        if here.startswith("no field of a recipe"):
            continue
        kind: Any = Recipe
        for part in here.replace(":", ",").split(",")[0].split(" ")[0].split("."):
            assert part in kind.model_fields, here
            inner = [
                kind.model_fields[part].annotation,
                *getattr(kind.model_fields[part].annotation, "__args__", ()),
            ]
            kind = next((one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)), None)
    for field, words in values.items():
        for here in words:
            word = re.split(r"[,;] | or | \(", here)[0]
            more = {"adapter": {"kind": "lora"}} if field == "quantize" else {}
            value = {"null": None}.get(word, word)
            if field == "adapter.kind" and value is None:
                continue
            recipe_from({**MODEL, **more}, [f"{field}={word}"])
        for word in (word for words_here in words.values() for word in words_here):
            with pytest.raises(InputError, match="here it is"):
                recipe_from(MODEL, [f"{field}={word}"])


COUNTS = {"100B": 1e11, "15t": 1.5e13, "1.5e12": 1.5e12, "1,000,000": 1e6, "1.46M": 1.46e6, "8 k": 8e3}
SHARES = {"40%": 0.4, "40 %": 0.4, "0.4": 0.4, "1": 1.0, "52.5%": 0.525}
NO_SHARES = {"40": "did you mean 40%", "140%": "at most 100%", "x": "not a share", "-1": "not a"}


def test_counts_and_shares_as_people_write_them() -> None:
    assert {text: read_count(text) for text in COUNTS} == pytest.approx(COUNTS)
    assert {text: read_share(text) for text in SHARES} == pytest.approx(SHARES)
    for text in ("", "many", "100GB", "nan", "inf", "-1", "1e999", "B", "0x10"):
        with pytest.raises(ValueError, match="not a count"):
            read_count(text)
    for text, says in NO_SHARES.items():
        with pytest.raises(ValueError, match=says):
            read_share(text)


def test_units_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    step = ["mfu", "--model", "openai-community/gpt2", "--batch", "8", "--seq", "64", "--gpu", "H100"]
    assert main([*step, "--mfu", "40%", "--tokens", "100B"]) == 0
    out, err = capsys.readouterr()
    assert "A run over 100.00B tokens" in out
    assert "40.00%" in out
    assert err == (
        "note: hardware.gpu = 'H100' is taken as h100-sxm (NVIDIA H100 SXM5 80GB); "
        "the catalog also has h100-pcie, h100-nvl\n"
    )
    assert main([*step, "--mfu", "40%", "--tokens", "1K", "--price", "3"]) == 0
    out, _ = capsys.readouterr()
    assert " 2 steps" in out
    assert not re.search(r"(GPU-hours|cost) +0 ", out)
    for share in ("1e-320%", "1e-200%"):
        assert main([*step, "--mfu", share, "--tokens", "100B"]) == 2
        assert "too small for a share" in capsys.readouterr().err
    assert main([*step, "--mfu", "40"]) == 2
    assert "did you mean 40%?" in capsys.readouterr().err


def test_auto_map_of_a_known_type_is_ignored_and_of_an_unknown_one_refused() -> None:
    known = {"model_type": "phi3", "hidden_size": 64, "auto_map": {"AutoModel": "a.B"}}
    assert not hasattr(hf_config_from(known), "auto_map")
    assert catalog.model_config(known) == known
    with pytest.raises(InputError, match="code of its repository, which is never run, and no type of"):
        hf_config_from(known | {"model_type": "unheard_of"})


@pytest.mark.parametrize("typed", ["4xH100", "4xh100", "4 x H100", "h100 x 4", "H100:4", "4*h100"])
def test_a_count_may_stand_on_a_gpus_name(typed: str) -> None:
    expected = recipe_from({**MODEL, "hardware": {"gpu": "h100-sxm", "count": 4}})
    assert recipe_from({**MODEL, "hardware": typed}) == expected
    assert recipe_from({**MODEL, "hardware": {"gpu": typed, "count": 4}}) == expected
    eight = {**MODEL, "hardware": {"gpu": "h200", "count": 8}}
    assert recipe_from(eight, [f'hardware.gpu="{typed}"']) == expected
    assert load("gpt2", gpu=typed) == expected


@pytest.mark.parametrize(
    ("typed", "count"), [("MI300X", None), ("8xMI300X", 8), ("rtx4090", None), ("2xRTX4090", 2)]
)
def test_an_x_of_a_gpus_own_name_is_no_count(typed: str, count: int | None) -> None:
    assert names.counted(typed)[1] == count


def test_two_counts_are_refused() -> None:
    with pytest.raises(InputError, match=r"hardware.gpu = '4xH100': hardware.count is 2; keep one"):
        recipe_from({**MODEL, "hardware": {"gpu": "4xH100", "count": 2}})
    with pytest.raises(InputError, match="the count of GPUs is set twice"):
        recipe_from(MODEL, ["hardware.gpu=4xH100", "hardware.count=2"])
    with pytest.raises(InputError, match=r"hardware.count is given twice"):
        load("gpt2", gpu="4xH100", count=2)
    with pytest.raises(InputError, match="a count stands on the name; name it as 'H100'"):
        catalog.gpu("4xH100")


def test_the_model_alone_is_its_config(tmp_path: Path) -> None:
    for text in ("model: llama-3.1-8b", "model: meta-llama/Llama-3.1-8B", "model: {config: llama-3.1-8b}"):
        (tmp_path / "recipe.yaml").write_text(text)
        assert load_recipe(tmp_path / "recipe.yaml").model.config == "llama-3.1-8b"
    assert recipe_from({"model": "gpt2"}, ["model=opt-125m"]).model.config == "opt-125m"
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    (tmp_path / "own.yaml").write_text("extends: recipe.yaml\nmodel: ./config.json")
    assert load_recipe(tmp_path / "own.yaml").model.config == {"model_type": "llama", "hidden_size": 64}


@pytest.mark.parametrize(
    ("word", "name", "implementation"),
    [
        ("adamw_torch", "adamw", "foreach"),
        ("adamw_torch_fused", "adamw", "fused"),
        ("adamw_bnb_8bit", "bnb-adamw8bit", "fused"),
        ("ADAMW_8BIT", "bnb-adamw8bit", "fused"),
        ("paged-adamw-8bit", "paged-adamw8bit", "fused"),
        ("paged_adamw_32bit", "paged-adamw", "fused"),
        ("paged_adamw", "paged-adamw", "fused"),
        ("adamw_torch_8bit", "torchao-adamw8bit", "fused"),
    ],
)
def test_the_trainers_words_for_optimizers(word: str, name: str, implementation: str) -> None:
    """They stand for the recipe's, in a file and in a setting; what is written beside them holds."""
    written = recipe_from({"model": "gpt2", "optimizer": {"name": name, "implementation": implementation}})
    assert recipe_from({"model": "gpt2", "optimizer": word}).id == written.id
    assert recipe_from({"model": "gpt2"}, [f"optimizer.name={word}"]).id == written.id
    other = recipe_from({"model": "gpt2", "optimizer": {"name": word, "implementation": "forloop"}})
    assert other.optimizer.implementation == "forloop"
