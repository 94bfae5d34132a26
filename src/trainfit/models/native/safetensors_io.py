"""Load and save weights of a NativeDecoder in the Hugging Face layout.

Loading checks every name and shape in the files' headers, then copies one tensor at a time, without a second
copy of the model. Saving copies one shard at a time to a new file, which replaces the old one when complete.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trainfit.models.native.decoder import NativeDecoder
from trainfit.models.native.layout import MappedTensor, mapped_tensors, tensor_of
from trainfit.spec.errors import InputError
from trainfit.spec.plain_data import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 4 * 2**30
RECOMPUTED = ".rotary_emb.inv_freq"
"""Buffer in old Llama files that the config determines."""


@torch.no_grad()
def load_safetensors(model: NativeDecoder, folder: str | Path) -> None:
    """Load ``model.safetensors`` or the shards of its index, cast to the model's dtype.

    Raises:
        InputError: Missing, unexpected or wrongly shaped tensors, before anything is changed; a damaged file;
            an output layer that differs from the embedding that it is tied to.
        FileNotFoundError: No weights in ``folder``.
    """
    folder = Path(folder)
    wanted = {entry.name: entry for entry in mapped_tensors(model.config)}
    files = _shard_files(folder)
    shapes = {name: (file, shape) for file in files for name, shape in _shapes(file).items()}
    _check(model, wanted, shapes, folder)
    device = model.embed.weight.device
    for file in files:
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open gives no iterator)
                if name in wanted:
                    tensor_of(model, wanted[name]).copy_(tensors.get_tensor(name))
                elif _is_tied_head(model, name) and not torch.equal(
                    model.lm_head.weight, tensors.get_tensor(name).to(model.lm_head.weight)
                ):
                    problem = "differs from the embedding that the config ties it to"
                    raise InputError(problem, "set tie_word_embeddings: false", field=name, file=str(file))


@torch.no_grad()
def save_safetensors(
    model: NativeDecoder,
    folder: str | Path,
    config: dict[str, Any],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Save the model, and ``config`` as config.json, in the form that transformers reads."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_split(model, mapped_tensors(model.config), max_shard_bytes))
    count = len(shards)
    names = (
        [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    )
    for name, shard in zip(names, shards, strict=True):
        data = {entry.name: tensor_of(model, entry).to("cpu", copy=True) for entry in shard}
        save_file(data, folder / f"{name}.new", metadata={"format": "pt"})
        os.replace(folder / f"{name}.new", folder / name)
    if count > 1:
        weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        total = sum(tensor_of(model, entry).nbytes for shard in shards for entry in shard)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    dtype = str(model.embed.weight.dtype).removeprefix("torch.")
    _write_json(folder / "config.json", {**config, "torch_dtype": dtype})
    for stale in {*folder.glob("model*.safetensors"), folder / INDEX} - {
        folder / name for name in (*names, INDEX)
    }:
        stale.unlink(missing_ok=True)
    if count == 1:
        (folder / INDEX).unlink(missing_ok=True)


def _shard_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise InputError(
                "no map from tensor to file", "fetch it again", field="weight_map", file=str(folder / INDEX)
            )
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).name != name:
                raise InputError(
                    "leaves its folder",
                    "name files in the folder of the index",
                    field=name,
                    file=str(folder / INDEX),
                )
        return [folder / name for name in names]
    if not (folder / SINGLE).exists():
        raise FileNotFoundError(f"{folder}: contains neither {SINGLE} nor {INDEX}")
    return [folder / SINGLE]


def _shapes(file: Path) -> dict[str, list[int]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"not a whole safetensors file: {error}", "fetch it again", file=str(file)) from None


def _check(
    model: NativeDecoder,
    wanted: dict[str, MappedTensor],
    shapes: dict[str, tuple[Path, list[int]]],
    folder: Path,
) -> None:
    missing = [name for name in wanted if name not in shapes]
    extra = [
        n for n in shapes if n not in wanted and not n.endswith(RECOMPUTED) and not _is_tied_head(model, n)
    ]
    for names, problem in ((missing, "missing"), (extra, "unexpected")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            remedy = "use the config.json that belongs to these weights"
            raise InputError(f"{problem} tensor {names[0]}{more}", remedy, file=str(folder))
    for name, entry in wanted.items():
        file, shape = shapes[name]
        expected = list(tensor_of(model, entry).shape)
        if shape != expected:
            problem = f"shape {shape} where the config needs {expected}"
            raise InputError(
                problem, "use the config.json that belongs to these weights", field=name, file=str(file)
            )


def _is_tied_head(model: NativeDecoder, name: str) -> bool:
    return model.config.tie_word_embeddings and name == "lm_head.weight"


def _split(
    model: NativeDecoder, rows: Iterable[MappedTensor], max_shard_bytes: int
) -> Iterable[list[MappedTensor]]:
    shard: list[MappedTensor] = []
    size = 0
    for entry in rows:
        nbytes = tensor_of(model, entry).nbytes
        if shard and size + nbytes > max_shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += nbytes
    yield shard


def _write_json(path: Path, data: dict[str, Any]) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(new, path)
