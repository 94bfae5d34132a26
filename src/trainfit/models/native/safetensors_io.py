"""Load and save weights of a NativeDecoder in the Hugging Face layout (Llama, Mistral, Qwen).

Loading checks every name and shape in the files' headers, then copies one tensor at a time, without a second
copy of the model. Saving copies one shard at a time to a new file, which replaces the old one when complete.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainfit.models.native.decoder import NativeDecoder
from trainfit.models.weights.layout import Stored, layout
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.plain_data import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
RECOMPUTED = ".rotary_emb.inv_freq"  # Buffer in old Llama files that the config determines
OTHER_CONFIG = "use the config.json that belongs to these weights"


@torch.no_grad()
def load_safetensors(model: NativeDecoder, folder: str | Path) -> None:
    """Load ``model.safetensors`` or the shards of its index, cast to the model's dtype.

    Raises:
        InputError: Missing, unexpected or wrongly shaped tensors, before anything is changed; a damaged file;
            an output layer that differs from the embedding that it is tied to.
        FileNotFoundError: No weights in ``folder``.
    """
    folder = Path(folder)
    wanted = {entry.name: entry for entry in layout(model)}
    parameters = model.state_dict()
    files = _shard_files(folder)
    _check(model, wanted, {name: (file, shape) for file in files for name, shape in _shapes(file)}, folder)
    for file in files:
        with safe_open(file, framework="pt", device=str(model.embed.weight.device)) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open gives no iterator)
                if name in wanted:
                    wanted[name].of(parameters[wanted[name].parameter]).copy_(tensors.get_tensor(name))
                elif _is_tied_head(model, name) and not torch.equal(
                    model.lm_head.weight, tensors.get_tensor(name).to(model.lm_head.weight)
                ):
                    problem = "differs from the embedding that the config ties it to"
                    raise InputError(problem, "set tie_word_embeddings: false", field=name, file=str(file))


@torch.no_grad()
def save_safetensors(
    model: NativeDecoder, folder: str | Path, config: dict[str, Any], *, max_shard_bytes: int = 4 * 2**30
) -> None:
    """Save the model, and ``config`` as config.json, in the form that transformers reads."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parameters = model.state_dict()
    state = {entry.name: entry.of(parameters[entry.parameter]) for entry in layout(model)}
    split = split_state_dict_into_shards_factory(
        state,
        get_storage_size=_num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        data = {name: state[name].to("cpu", copy=True) for name in names}
        save_file(data, folder / f"{file}.new", metadata={"format": "pt"})
        os.replace(folder / f"{file}.new", folder / file)
    kept = {folder / file for file in split.filename_to_tensors}
    if split.is_sharded:
        _write_json(folder / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
        kept.add(folder / INDEX)
    dtype = str(model.embed.weight.dtype).removeprefix("torch.")
    _write_json(folder / "config.json", {**config, "torch_dtype": dtype})
    for stale in {*folder.glob("model*.safetensors"), folder / INDEX} - kept:
        stale.unlink(missing_ok=True)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.nbytes


def _shard_files(folder: Path) -> list[Path]:
    index_file = folder / INDEX
    if not index_file.exists():
        if not (folder / SINGLE).exists():
            raise FileNotFoundError(f"{folder}: contains neither {SINGLE} nor {INDEX}")
        return [folder / SINGLE]
    index = read_json(index_file)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        problem = "no map from tensor to file"
        raise InputError(problem, "fetch it again", field="weight_map", file=str(index_file))
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            remedy = "name files in the folder of the index"
            raise InputError("leaves its folder", remedy, field=name, file=str(index_file))
    return [folder / name for name in names]


def _shapes(file: Path) -> list[tuple[str, list[int]]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return [(name, tensors.get_slice(name).get_shape()) for name in tensors.keys()]  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"not a whole safetensors file: {error}", "fetch it again", file=str(file)) from None


def _check(
    model: NativeDecoder, wanted: dict[str, Stored], found: dict[str, tuple[Path, list[int]]], at: Path
) -> None:
    known = {*wanted, *(name for name in found if name.endswith(RECOMPUTED) or _is_tied_head(model, name))}
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in known]
    for names, problem in ((missing, "missing"), (unexpected, "unexpected")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(f"{problem} tensor {names[0]}{more}", OTHER_CONFIG, file=str(at))
    for name, entry in wanted.items():
        file, shape = found[name]
        expected = list(entry.shape)
        if shape != expected:
            problem = f"shape {shape} where the config needs {expected}"
            raise InputError(problem, OTHER_CONFIG, field=name, file=str(file))


def _is_tied_head(model: NativeDecoder, name: str) -> bool:
    return model.config.tie_word_embeddings and name == "lm_head.weight"


def _write_json(path: Path, data: dict[str, Any]) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(new, path)
