"""Exports: transformers and PEFT compute what the run's own model computes."""

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

import rank_training
from exported_runs import base_of, logits_of, logits_of_run, trained
from rank_processes import Ranks
from tiny_training import GPT2, LLAMA
from trainfit.cli.main import main
from trainfit.spec.errors import InputError
from trainfit.training.export import export as module
from trainfit.training.export.export import export
from trainfit.training.export.saved_run import open_saved
from trainfit.training.folder import write_best

EXACT, MERGED = 1e-5, 1e-4
NATIVE = "model.implementation=native"
OWN = {"model_type": "trainfit"}
MOE = LLAMA | {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 0}
TYPES = {
    "llama": (LLAMA | {"attention_bias": True, "mlp_bias": True}, NATIVE),
    "mistral": (LLAMA | {"model_type": "mistral", "sliding_window": 8}, NATIVE, "attention=eager"),
    "qwen2": (LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True}, NATIVE),
    "qwen3": (LLAMA | {"model_type": "qwen3", "head_dim": 32}, NATIVE),
    "llama, own keys": (LLAMA | OWN | {"tie_word_embeddings": True}, NATIVE),
    "qwen3, own keys": (LLAMA | OWN | {"qk_norm": True, "hidden_act": "gelu_tanh"}, NATIVE),
    "hf llama": (LLAMA, "model.implementation=hf", "recompute=full"),
    "gpt2": (GPT2 | {"resid_pdrop": 0.0}, "model.implementation=hf"),
    "olmoe": (MOE, "model.implementation=hf"),
    "gpt_neox": (LLAMA | {"model_type": "gpt_neox"}, "model.implementation=hf"),
}  # fmt: skip


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model


def names_in(folder: Path) -> set[str]:
    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found |= set(opened.keys())
    return found


@pytest.mark.parametrize("kind", TYPES)
def test_transformers_computes_the_logits_of_the_run(kind: str, tmp_path: Path) -> None:
    config, *settings = TYPES[kind]
    trained(tmp_path / "run", *settings, config=config)
    found = export(tmp_path / "run", tmp_path / "model")
    assert (found.kind, found.step, found.base, found.merged) == ("model", 2, None, False)
    model = loaded(tmp_path / "model")
    assert torch.allclose(logits_of(model), logits_of_run(tmp_path / "run"), atol=EXACT, rtol=0)
    # The folder has the names that transformers itself gives the model's tensors.
    model.save_pretrained(tmp_path / "theirs")
    assert names_in(tmp_path / "model") == names_in(tmp_path / "theirs")
    ours, theirs = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("model", "theirs"))
    assert ours == theirs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a native Llama, with checkpoints after steps 2 and 4 and evaluations."""
    out = tmp_path_factory.mktemp("exported") / "run"
    trained(out, NATIVE, config=LLAMA, steps=4, save_every=2, eval_every=2, eval_fraction=0.1)
    return out


def test_shards_dtype_and_the_checkpoint_are_chosen(run: Path, tmp_path: Path) -> None:
    whole = export(run, tmp_path / "whole")
    assert [one for one in whole.files if "safetensors" in one] == ["model.safetensors"]
    parts = export(run, tmp_path / "parts", dtype="bf16", max_shard_bytes=30_000)
    files = [one for one in parts.files if one.endswith(".safetensors")]
    assert len(files) > 1
    assert all((tmp_path / "parts" / one).stat().st_size < 30_000 + 4096 for one in files)
    assert parts.weights_bytes * 2 == whole.weights_bytes
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": whole.parameters, "total_size": parts.weights_bytes}
    assert set(index["weight_map"]) == names_in(tmp_path / "whole")
    assert loaded(tmp_path / "parts").config.dtype == torch.float32  # As it was asked to load.
    state, rounded = (loaded(tmp_path / one).state_dict() for one in ("whole", "parts"))
    assert all(torch.equal(value.bfloat16().float(), rounded[name]) for name, value in state.items())
    earlier = export(run / "checkpoints" / "step-00000002", tmp_path / "earlier")
    again = export(run, tmp_path / "again", step=2)
    assert earlier.step == again.step == 2
    same = loaded(tmp_path / "earlier").state_dict()
    assert all(
        torch.equal(value, same[name]) for name, value in loaded(tmp_path / "again").state_dict().items()
    )
    assert not all(torch.equal(value, same[name]) for name, value in state.items())


def test_a_value_beyond_fp16_is_refused_and_nothing_remains(run: Path, tmp_path: Path, monkeypatch) -> None:
    plain = module.WholeModel.entries

    def large(self: Any, dtype: torch.dtype | None) -> Any:
        entries = plain(self, dtype)
        first = next(iter(entries))
        read = entries[first].read
        return entries | {first: module.Entry(entries[first].shape, torch.float16, lambda: read() + 1e6)}

    monkeypatch.setattr(module.WholeModel, "entries", large)
    with pytest.raises(InputError, match=r"embed_tokens.weight has values beyond the range of float16"):
        export(run, tmp_path / "model", dtype="fp16")
    assert not list(tmp_path.iterdir())


ADAPTERS = {
    "lora": ("adapter.kind=lora", "adapter.rank=4", "adapter.alpha=8"),
    "lora of some": ("adapter.kind=lora", "adapter.targets=[down, qkv]", NATIVE),
    "lora with magnitudes": ("adapter.kind=dora", "adapter.rank=4"),
    "lora and the head": ("adapter.kind=lora", "adapter.rank=4", "adapter.modules_to_save=[lm_head]"),
    "prompt": ("adapter.kind=prompt", "adapter.tokens=5"),
    "prefix": ("adapter.kind=prefix", "adapter.tokens=5", "attention=eager"),
    "p-tuning": ("adapter.kind=p-tuning", "adapter.tokens=5"),
    "prefix by an mlp": ("adapter.kind=prefix", "adapter.tokens=5", "adapter.reparametrization=mlp",
                         "adapter.encoder_hidden_size=24", "attention=eager"),
    "p-tuning by an lstm": ("adapter.kind=p-tuning", "adapter.tokens=5", "adapter.reparametrization=lstm"),
    "p-tuning of embeddings": ("adapter.kind=p-tuning", "adapter.tokens=5", "adapter.reparametrization=none"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "implementation", "config"),
    [
        *(
            (kind, one, LLAMA)
            for kind in ("lora", "prompt", "prefix", "p-tuning")
            for one in ("hf", "native")
        ),
        ("prefix by an mlp", "hf", LLAMA),
        *(("p-tuning by an lstm", one, LLAMA) for one in ("hf", "native")),
        ("p-tuning of embeddings", "native", LLAMA),
        ("lora with magnitudes", "hf", LLAMA),
        ("lora with magnitudes", "native", LLAMA),
        ("lora and the head", "hf", LLAMA),
        ("lora", "native", LLAMA | {"model_type": "mistral"}),
        ("lora", "native", LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True}),
        ("lora of some", "native", LLAMA | {"model_type": "qwen3", "head_dim": 32}),
        ("lora", "hf", GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    ],
)
def test_peft_computes_the_logits_of_the_run(
    kind: str, implementation: str, config: dict, tmp_path: Path
) -> None:
    from peft import PeftModel

    settings = (*ADAPTERS[kind], f"model.implementation={implementation}")
    recipe = trained(tmp_path / "run", *settings, config=config)
    found = export(tmp_path / "run", tmp_path / "adapter")
    assert (found.kind, found.merged) == ("adapter", False)
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(found.files)
    expected = logits_of_run(tmp_path / "run")
    base = base_of(recipe)
    before = logits_of(base)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.allclose(logits_of(model), expected, atol=EXACT, rtol=0)
    assert not torch.allclose(before, expected, atol=1e-3), "the adapter does something"
    if not kind.startswith("lora"):
        with pytest.raises(InputError, match="virtual tokens"):
            export(tmp_path / "run", tmp_path / "merged", merge=True)
        return
    merged = export(tmp_path / "run", tmp_path / "merged", merge=True)
    assert (merged.kind, merged.merged) == ("model", True)
    assert torch.allclose(logits_of(loaded(tmp_path / "merged")), expected, atol=MERGED, rtol=0)
    # PEFT writes the same config and names.
    model.save_pretrained(tmp_path / "theirs")
    assert names_in(tmp_path / "adapter") == names_in(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("implementation", "names"), [("hf", "q_proj,embed_tokens"), ("native", "qkv,embed")]
)
def test_an_adapter_of_one_of_two_tied_weights_unties_them(
    implementation: str, names: str, tmp_path: Path
) -> None:
    settings = ("adapter.kind=lora", f"adapter.targets=[{names}]", f"model.implementation={implementation}")
    trained(tmp_path / "run", *settings, config=LLAMA | {"tie_word_embeddings": True})
    found = export(tmp_path / "run", tmp_path / "merged", merge=True)
    assert found.notes == ("the adapter changed one of two tied weights: tie_word_embeddings is false",)
    model = loaded(tmp_path / "merged")
    assert not model.config.tie_word_embeddings
    assert torch.allclose(logits_of(model), logits_of_run(tmp_path / "run"), atol=MERGED, rtol=0)


@pytest.mark.parametrize(
    ("quantize", "implementation", "config"),
    [("nf4", "native", LLAMA), ("{kind: nf4, double: false}", "hf", LLAMA), ("int8", "hf", GPT2)],
)
def test_a_quantised_base_is_dequantised_when_merged(
    quantize: str, implementation: str, config: dict, tmp_path: Path
) -> None:
    settings = ("adapter.kind=lora", f"quantize={quantize}", f"model.implementation={implementation}")
    trained(tmp_path / "run", *settings, config=config)
    found = export(tmp_path / "run", tmp_path / "merged", merge=True)
    assert "dequantised" in found.notes[0]
    expected = logits_of_run(tmp_path / "run")
    assert torch.allclose(logits_of(loaded(tmp_path / "merged")), expected, atol=MERGED, rtol=0)


@pytest.fixture(scope="module")
def ranks() -> Any:
    with Ranks(2) as running:
        yield running


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("fsdp", (NATIVE,)),
        ("ddp", ()),
        ("fsdp", ("quantize=nf4", "adapter.kind=lora", "adapter.rank=4")),
        ("auto", ("parallel.tensor=2", "model.config.num_key_value_heads=2", "batch.accumulate=1")),
        ("auto", (
            NATIVE, "parallel.tensor=2", "model.config.num_key_value_heads=2", "batch.accumulate=1",
            "adapter.kind=lora", "adapter.rank=4", "quantize=fp8",
        )),
        ("fsdp", ("parallel.expert=2", *(f"model.config.{key}={value}" for key, value in (
            ("model_type", "olmoe"), ("num_experts", 4), ("num_experts_per_tok", 2)))))
    ],
)  # fmt: skip
def test_checkpoints_of_any_mesh_are_exported(
    ranks: Ranks, strategy: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    ranks.run(rank_training.trained, tmp_path / "run", strategy, 2, *settings)
    assert (tmp_path / "run" / "checkpoints" / "step-00000002" / ".metadata").is_file()
    has_adapter = "adapter.kind=lora" in settings
    export(tmp_path / "run", tmp_path / "model", merge=has_adapter)
    alone = rank_training.recipe_of(None, *(one for one in settings if not one.startswith("parallel")))
    expected = logits_of_run(tmp_path / "run", recipe=alone)
    close = MERGED if has_adapter else EXACT
    assert torch.allclose(logits_of(loaded(tmp_path / "model")), expected, atol=close, rtol=0)


@pytest.mark.parametrize("implementation", ["native", "hf"])
def test_training_goes_on_from_an_export(run: Path, tmp_path: Path, implementation: str) -> None:
    """A step that changes nothing leaves the evaluation of the run that was exported."""
    export(run, tmp_path / "model", max_shard_bytes=30_000)
    settings = (f"model.weights={tmp_path / 'model'}", f"model.implementation={implementation}")
    found = trained(
        tmp_path / "on", *settings, "optimizer.lr=1e-30", config=LLAMA, steps=1, eval_fraction=0.1,
        tokenizer=str(tmp_path / "model" / "tokenizer.json"),
    )  # fmt: skip
    before, after = (open_saved(one, None).log()[-1]["loss"] for one in (run, tmp_path / "on"))
    assert after == pytest.approx(before, abs=EXACT)
    again = export(tmp_path / "on", tmp_path / "again")
    assert again.base == found.model.weights == str(tmp_path / "model")
    state = loaded(tmp_path / "again").state_dict()
    assert all(
        torch.allclose(value, state[name], atol=1e-7)
        for name, value in loaded(tmp_path / "model").state_dict().items()
    )
    card = (tmp_path / "again" / "README.md").read_text()
    assert f"base_model: {tmp_path / 'model'}" in card


def test_a_model_of_our_own_is_fine_tuned_exported_and_loaded_by_peft(tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    stories = {"kind": "stories", "num_documents": 300}
    trained(tmp_path / "first", NATIVE, config=LLAMA, steps=30, data=stories, eval_fraction=0.1)
    base = tmp_path / "base"
    export(tmp_path / "first", base)
    settings = (f"model.weights={base}", "adapter.kind=lora", "adapter.rank=4")
    tokenizer = str(base / "tokenizer.json")
    tuned = tmp_path / "tuned"
    trained(tuned, *settings, config=LLAMA, steps=10, data=stories, eval_fraction=0.1, tokenizer=tokenizer)
    pretrained, better = (open_saved(one, None).log()[-1]["loss"] for one in (tmp_path / "first", tuned))
    assert better < pretrained < 5.5  # log(384) is 5.95
    expected = logits_of_run(tuned, recipe=open_saved(tuned, None).recipe)
    assert export(tuned, tmp_path / "adapter").base == str(base)
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    assert torch.allclose(logits_of(model), expected, atol=EXACT, rtol=0)
    export(tuned, tmp_path / "merged", merge=True)
    assert torch.allclose(logits_of(loaded(tmp_path / "merged")), expected, atol=MERGED, rtol=0)


def test_master_weights_are_exported_in_fp32(tmp_path: Path) -> None:
    trained(tmp_path / "run", NATIVE, "precision=bf16-master", config=LLAMA)
    coarse = export(tmp_path / "run", tmp_path / "bf16")
    fine = export(tmp_path / "run", tmp_path / "fp32", dtype="fp32")
    assert (coarse.dtype, fine.dtype) == ("bfloat16", "float32")
    assert "--dtype fp32" in coarse.notes[0]
    assert "master weights" in fine.notes[0]
    state, masters = (loaded(tmp_path / one).state_dict() for one in ("bf16", "fp32"))
    assert all(torch.equal(value.bfloat16().float(), state[name]) for name, value in masters.items())
    assert not all(torch.equal(value, state[name]) for name, value in masters.items())


def test_the_tokenizer_and_generation_are_the_runs(run: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    export(run, tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "Once upon a time,  ü 1234\n\nthe end"
    own = Tokenizer.from_file(str(run / "data" / "tokenizer.json"))
    assert tokenizer(text)["input_ids"] == own.encode(text).ids
    assert tokenizer.eos_token == "<|endoftext|>"
    model = loaded(tmp_path / "model")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == own.token_to_id("<|endoftext|>")
    assert model.config.use_cache
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    assert model.generate(**inputs, max_new_tokens=3).shape[1] > inputs["input_ids"].shape[1]


def test_what_stands_beside_a_given_tokenizer_comes_along(run: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    export(run, tmp_path / "first")
    given = tmp_path / "first"
    (given / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for out in ("same", "other"):
        trained(tmp_path / out, NATIVE, config=LLAMA, steps=1, tokenizer=str(given / "tokenizer.json"))
    export(tmp_path / "same", tmp_path / "with")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "with")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello"
    content = json.loads((given / "tokenizer.json").read_text())
    (given / "tokenizer.json").write_text(json.dumps(content, indent=1))  # Another file since.
    assert "chat_template.jinja" not in export(tmp_path / "other", tmp_path / "without").files


def test_code_that_a_tokenizer_names_is_never_run(run: Path, tmp_path: Path) -> None:
    given = shutil.copytree(run / "data", tmp_path / "given") / "tokenizer.json"
    (given.parent / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    named = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (given.parent / "tokenizer_config.json").write_text(json.dumps(named))
    trained(tmp_path / "run", NATIVE, config=LLAMA, steps=1, tokenizer=str(given))
    found = export(tmp_path / "run", tmp_path / "model")
    assert "tokenizer_config.json" in found.files
    assert not (tmp_path / "ran").exists()
    (note,) = found.notes
    assert note.startswith("AutoTokenizer does not load the tokenizer (The repository of the folder contains")


def test_a_tokenizer_class_that_splits_differently_is_named(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    text = tmp_path / "text.txt"
    text.write_text("numbers 2026 2027 2028 2026 2027 2028 2029 " * 200)
    data = {"kind": "text", "path": str(text)}
    qwen2 = LLAMA | {"model_type": "qwen2"}
    trained(tmp_path / "run", NATIVE, config=qwen2, steps=1, data=data)
    found = export(tmp_path / "run", tmp_path / "model")
    fast: Any = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    auto: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    own = Tokenizer.from_file(str(tmp_path / "run" / "data" / "tokenizer.json"))
    assert fast("2026 2027")["input_ids"] == own.encode("2026 2027").ids
    differs = auto("2026 2027")["input_ids"] != own.encode("2026 2027").ids
    assert differs == any("splits text differently" in note for note in found.notes)


def test_the_model_card_has_the_runs_figures(run: Path, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    export(run, tmp_path / "model")
    card = ModelCard.load(tmp_path / "model" / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["trainfit"]
    saved = open_saved(run, None)
    assert f"| training loss, last step | {saved.state.loss:.4f} |" in card.text
    assert "| steps | 4 |" in card.text
    assert "| tokens | 512 (128 a step, sequences of 32) |" in card.text
    assert "evaluation loss, after step 4" in card.text
    assert saved.recipe.id in card.text
    assert "random weights" in card.text
    export(run, tmp_path / "earlier", step=2)
    assert "evaluation loss, after step 2" in (tmp_path / "earlier" / "README.md").read_text()


def test_the_best_checkpoint_is_chosen_where_it_was_kept(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    assert export(copy, tmp_path / "newest").step == 4
    write_best(copy, {"step": 2, "loss": 1.0})
    found = export(copy, tmp_path / "best")
    assert found.step == 2
    assert found.notes == ("step 2 is not the newest checkpoint, which is of step 4",)
    assert export(copy, tmp_path / "chosen", step=4).step == 4


def test_a_damaged_or_missing_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    def refused(match: str, folder: Path = run, to: Path = tmp_path / "model", **options: Any) -> None:
        with pytest.raises(InputError, match=match):
            export(folder, to, **options)
        assert not (tmp_path / "model").exists()

    refused("no such folder", tmp_path / "nothing")
    refused("no run in this folder", tmp_path)
    refused("step = 3: no checkpoint of this step.*use one of 2, 4", step=3)
    refused("trained whole weights and no adapter", merge=True)
    refused("lies in a checkpoint", to=run / "checkpoints" / "step-00000004" / "model")
    refused("already there", to=run)
    copy = shutil.copytree(run, tmp_path / "copy")
    weights = copy / "checkpoints" / "step-00000004" / "model-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    refused("SHA-256 differs", copy)
    shutil.rmtree(copy / "checkpoints")
    refused("no checkpoint yet", copy)


def test_a_model_that_transformers_does_not_have_is_refused(tmp_path: Path) -> None:
    config = LLAMA | OWN | {"position_embedding": "alibi"}
    trained(tmp_path / "run", NATIVE, config=config, steps=1)
    with pytest.raises(InputError, match="position_embedding = 'alibi': no model type of transformers"):
        export(tmp_path / "run", tmp_path / "model")


def test_the_command_writes_one_folder_or_nothing(run: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    folder = tmp_path / "new" / "model"
    assert main(["export", str(run), str(folder), "--dtype", "bf16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["dtype"], found["step"]) == ("model", "bfloat16", 4)
    assert sorted(path.name for path in folder.iterdir()) == found["files"]
    assert main(["export", str(run), str(folder)]) == 65
    assert "already there" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "text")]) == 0
    assert "AutoModelForCausalLM.from_pretrained" in capsys.readouterr().out
    assert main(["export", str(run), str(tmp_path / "x"), "--max-shard-size", "big"]) == 65
    usage = namedtuple("usage", "free")(1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert main(["export", str(run), str(tmp_path / "full")]) == 74
    error = capsys.readouterr().err
    assert "No space left" in error
    assert "1000 B are free" in error
    assert not (tmp_path / "full").exists()
