"""Steps that start from a folder's weights: the loss is transformers', whatever wrote and cut the files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from saved_weights import EXPERTS, SIZES, batch_of, config_of, loss_of, recipe_for, saved_weights
from trainfit.catalog.model_types import native_types
from trainfit.models.weights.folder import INDEX, SINGLE, located, open_folder
from trainfit.models.weights.match import matched
from trainfit.spec.errors import InputError
from trainfit.step import Step, assemble

CPU = torch.device("cpu")
EQUAL = 1e-5


def started(folder: Path, implementation: str = "hf", **fields: Any) -> Step:
    return assemble(recipe_for(folder, implementation, **fields), CPU)


def first_loss(folder: Path, implementation: str = "hf", **fields: Any) -> float:
    return started(folder, implementation, **fields)([batch_of()]).item()


NATIVE = [(kind, implementation) for kind in native_types() for implementation in ("hf", "native")]


@pytest.mark.parametrize(("kind", "implementation"), [*NATIVE, ("gemma3_text", "hf"), ("gpt_neox", "hf")])
@pytest.mark.parametrize("tied", [True, False])
def test_the_first_loss_is_that_of_transformers(
    kind: str, implementation: str, tied: bool, tmp_path: Path
) -> None:
    theirs = saved_weights(tmp_path, kind, {"tie_word_embeddings": tied}, max_shard_size="20KB")
    assert (tmp_path / INDEX).exists()
    assert first_loss(tmp_path, implementation) == pytest.approx(loss_of(theirs), abs=EQUAL)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_that_a_folder_has_one_by_one(kind: str, tmp_path: Path) -> None:
    theirs = saved_weights(tmp_path, kind, {**EXPERTS, "num_local_experts": 4}, max_shard_size="50KB")
    assert first_loss(tmp_path) == pytest.approx(loss_of(theirs), abs=EQUAL)
    theirs.save_pretrained(tmp_path, save_original_format=False)  # Whole, as transformers holds them.
    assert any(name.endswith("gate_up_proj") for name in load_file(tmp_path / SINGLE))
    assert first_loss(tmp_path) == pytest.approx(loss_of(theirs), abs=EQUAL)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("implementation", ["hf", "native"])
def test_dtypes_are_converted_and_said(dtype: torch.dtype, implementation: str, tmp_path: Path) -> None:
    theirs = saved_weights(tmp_path, "qwen3", dtype=dtype)
    kind = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    step = started(tmp_path, implementation)
    assert step([batch_of()]).item() == pytest.approx(loss_of(theirs), abs=EQUAL)
    assert step.weights is not None
    assert step.weights.note().endswith("in fp32" if kind == "fp32" else f"in {kind}, converted to fp32")
    in_bf16 = started(tmp_path, implementation, precision="bf16")
    assert {one.dtype for one in in_bf16.model.parameters()} == {torch.bfloat16}
    read = load_file(tmp_path / SINGLE)["model.norm.weight"]
    norm = dict(in_bf16.model.named_parameters())[
        "model.norm.weight" if implementation == "hf" else "norm.weight"
    ]
    assert torch.equal(norm, read.bfloat16())


@pytest.mark.parametrize(
    "fields",
    [
        {"adapter": {"kind": "lora"}},
        {"adapter": {"kind": "prompt"}},
        {"offload": {"weights": True}, "recompute": "full", "optimizer": {"in_backward": True}},
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", ["hf", "native"])
def test_with_techniques_that_rename_or_move_weights(
    implementation: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    theirs = saved_weights(tmp_path, "qwen3", {"tie_word_embeddings": True})
    step = started(tmp_path, implementation, **fields)
    own = step.model.state_dict()
    files = load_file(tmp_path / SINGLE)
    embedding = next(
        one for name, one in own.items() if name.endswith(("embed_tokens.weight", "embed.weight"))
    )
    assert torch.equal(embedding, files["model.embed_tokens.weight"])
    if fields.get("adapter", {}).get("kind") != "prompt":  # Its virtual tokens change the loss.
        assert step([batch_of()]).item() == pytest.approx(loss_of(theirs), abs=EQUAL)


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
@pytest.mark.parametrize("implementation", ["hf", "native"])
def test_quantised_while_reading(implementation: str, kind: str, tmp_path: Path) -> None:
    """The codes are those of the same weights that were quantised by themselves."""
    from trainfit.models.quantized_linear import QuantizedLinear

    saved_weights(tmp_path, "llama")
    step = started(tmp_path, implementation, quantize=kind, adapter={"kind": "lora"})
    layers = {name: one for name, one in step.model.named_modules() if isinstance(one, QuantizedLinear)}
    ends = ("layers.1.mlp.down_proj.base_layer", "layers.1.mlp.down.base_layer")
    found = next(one for name, one in layers.items() if name.endswith(ends))
    weight = load_file(tmp_path / SINGLE)["model.layers.1.mlp.down_proj.weight"]
    alone = QuantizedLinear(48, 32, False, kind, torch.float32, CPU)
    alone.load(weight, None)
    assert torch.equal(found.dequantize(torch.float32), alone.dequantize(torch.float32))


def test_padding_and_other_tokens_are_read(tmp_path: Path) -> None:
    saved_weights(tmp_path, "llama")
    step = started(tmp_path, "native")
    files = load_file(tmp_path / SINGLE)
    assert torch.equal(step.model.get_parameter("embed.weight"), files["model.embed_tokens.weight"])


# Folders that are not as transformers saves them now


def renamed(folder: Path, rename: Callable[[str], str], **more: torch.Tensor) -> None:
    files = {rename(name): one for name, one in load_file(folder / SINGLE).items()}
    save_file({**files, **more}, folder / SINGLE, {"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "rename", "more"),
    [
        # The Hub's gpt2: without the prefix, with masks; GPT-NeoX's former name of the head
        ("gpt2", lambda name: name.removeprefix("transformer."), {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}),
        ("llama", lambda name: name, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        ("llama", lambda name: name.replace("model.", "model.language_model."), {}),
        (
            "llama",
            lambda name: f"language_model.{name}",
            {"vision_tower.patch.weight": torch.ones(3), "multi_modal_projector.weight": torch.ones(3)},
        ),
    ],
    ids=["gpt2", "inv_freq", "within", "multimodal"],
)
def test_other_names_that_folders_have(
    kind: str, rename: Callable[[str], str], more: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    theirs = saved_weights(tmp_path, kind, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
    renamed(tmp_path, rename, **more)
    step = started(tmp_path)
    assert step([batch_of()]).item() == pytest.approx(loss_of(theirs), abs=EQUAL)
    assert step.weights is not None
    assert ("2 tensors of other parts of the model are not read" in step.weights.note()) == (len(more) == 2)


def test_a_tied_head_may_be_in_the_folder_too(tmp_path: Path) -> None:
    theirs = saved_weights(tmp_path, "qwen2", {"tie_word_embeddings": True})
    head = load_file(tmp_path / SINGLE)["model.embed_tokens.weight"]
    renamed(tmp_path, lambda name: name, **{"lm_head.weight": head.clone()})
    for implementation in ("hf", "native"):
        assert first_loss(tmp_path, implementation) == pytest.approx(loss_of(theirs), abs=EQUAL)
    renamed(tmp_path, lambda name: name, **{"lm_head.weight": head + 1})
    with pytest.raises(InputError, match=r"lm_head.weight: differs .* tie_word_embeddings: false"):
        started(tmp_path)
    files = load_file(tmp_path / SINGLE)
    files["lm_head.weight"] = files.pop("model.embed_tokens.weight")
    save_file(files, tmp_path / SINGLE)
    assert first_loss(tmp_path, "native") == pytest.approx(loss_of(theirs), abs=EQUAL)


# What is refused, by name


def without(files: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: one for name, one in files.items() if name not in names}


REFUSED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], list[str]]] = {
    "missing": (
        lambda files: without(files, "model.norm.weight"),
        ["it lacks 1 tensor (model.norm.weight)", "config.json"],
    ),
    "many missing": (
        lambda files: {name: one for name, one in files.items() if ".layers.1." not in name},
        ["it lacks 9 tensors (model.layers.1.", "and 6 more)"],
    ),
    "extra": (
        lambda files: {**files, "model.layers.2.mlp.up_proj.weight": torch.ones(2)},
        ["it has 1 tensor (model.layers.2.mlp.up_proj.weight), which the model lacks"],
    ),
    "quantised": (
        lambda files: {
            **without(files, "lm_head.weight"),
            "lm_head.qweight": torch.ones(2, dtype=torch.int32),
        },
        ["lm_head.qweight", "these are quantised", "bf16, fp16 or fp32"],
    ),
    "an adapter's": (
        lambda files: {**files, "model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 2)},
        ["lora_A", "merge the adapter"],
    ),
    "shape": (
        lambda files: {**files, "model.norm.weight": torch.ones(31)},
        ["model.norm.weight", "[31]", "[32]"],
    ),
    "fp8": (
        lambda files: {**files, "lm_head.weight": files["lm_head.weight"].to(torch.float8_e4m3fn)},
        ["lm_head.weight", "F8_E4M3", "quantised", "bf16, fp16 or fp32"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("implementation", ["hf", "native"])
def test_folders_that_do_not_fit_are_refused_by_name(case: str, implementation: str, tmp_path: Path) -> None:
    saved_weights(tmp_path, "llama")
    change, words = REFUSED[case]
    save_file(change(load_file(tmp_path / SINGLE)), tmp_path / SINGLE)
    with pytest.raises(InputError) as caught:
        started(tmp_path, implementation)
    for word in words:
        assert word in str(caught.value)


def emptied(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def truncated(folder: Path) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-10])


def pickled(folder: Path) -> None:
    emptied(folder)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/pwned'\ntR.")


def lost_shard(folder: Path) -> None:
    shutil.copy(folder / SINGLE, folder / "model-00001-of-00002.safetensors")
    (folder / SINGLE).unlink()
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))


def leaving_index(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))


def of_an_adapter(folder: Path) -> None:
    emptied(folder)
    (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (emptied, ["neither model.safetensors nor"]),
        (truncated, ["not a whole safetensors file", "fetch it again"]),
        (pickled, ["pytorch_model.bin", "can run code", "convert them to safetensors"]),
        (lost_shard, ["model-00002-of-00002.safetensors", "missing"]),
        (leaving_index, ["leaves its folder"]),
        (of_an_adapter, ["an adapter", "base model"]),
    ],
)
def test_damaged_and_other_folders(change: Callable[[Path], None], words: list[str], tmp_path: Path) -> None:
    saved_weights(tmp_path, "llama")
    change(tmp_path)
    with pytest.raises(InputError) as caught:
        started(tmp_path)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_of_folders_and_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert located(str(tmp_path), fetch=False) == tmp_path
    assert located("owner/not-in-the-cache", fetch=False) is None
    for named in ("./nowhere", str(tmp_path / "nowhere"), "nowhere", "a/b/c"):
        with pytest.raises(InputError, match="no such folder"):
            located(named, fetch=True)
    with pytest.raises(InputError, match="a repository such as openai-community/gpt2"):
        located("gpt2", fetch=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="neither in the local cache nor to be fetched"):
        located("owner/not-in-the-cache", fetch=True)


def test_a_cached_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache's layout: refs name a commit, whose snapshot has the files."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--tiny"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    assert located("owner/tiny", fetch=False) is None, "its weights are not in the cache"
    theirs = saved_weights(snapshot, "llama")
    assert located("owner/tiny", fetch=False) == snapshot
    recipe = recipe_for(snapshot)
    model = recipe.model.model_copy(update={"weights": "owner/tiny"})
    loss = assemble(recipe.model_copy(update={"model": model}), CPU)([batch_of()])
    assert loss.item() == pytest.approx(loss_of(theirs), abs=EQUAL)


def test_only_headers_are_read_to_match(tmp_path: Path) -> None:
    from trainfit.models.build import build_model

    saved_weights(tmp_path, "llama", max_shard_size="20KB")
    folder = open_folder(tmp_path, "it")
    model = build_model(recipe_for(tmp_path).model, dtype=torch.float32, device="meta")
    assert {stored.name for stored, _ in matched(model, folder).headers()} == set(folder.tensors)
    assert config_of(tmp_path)["hidden_size"] == SIZES["hidden_size"]
