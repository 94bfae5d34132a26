"""Weights of a NativeDecoder from and to a folder in the Hugging Face layout.

Loading checks every name and shape from the files' headers first, then copies one tensor at a time into its place:
no second copy of the model, on the CPU or on the device. Saving writes shards to new files that replace old ones when
whole; at most one shard is copied at a time.
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
from trainfit.models.native.layout import Slot, slots, tensor_of
from trainfit.spec.errors import InputError
from trainfit.spec.recipe_file import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 4 * 2**30
RECOMPUTED = ".rotary_emb.inv_freq"
"""Old Llama files carry this buffer; it follows from the config."""


@torch.no_grad()
def load_safetensors(model: NativeDecoder, folder: str | Path) -> None:
    """Fill ``model`` from ``model.safetensors`` or the shards that its index lists; values are cast to its dtype.

    Raises:
        InputError: missing, unexpected or wrongly shaped tensors, by name, before anything is changed; a damaged
            file; a head in the file that differs from the embedding it should be tied to.
        FileNotFoundError: no weights in ``folder``.
    """
    folder = Path(folder)
    wanted = {slot.name: slot for slot in slots(model.config)}
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
    """Write ``model`` and its config.json, the mapping it was built from, as transformers would read them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_split(model, slots(model.config), max_shard_bytes))
    count = len(shards)
    names = (
        [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    )
    for name, shard in zip(names, shards, strict=True):
        data = {slot.name: tensor_of(model, slot).to("cpu", copy=True) for slot in shard}
        save_file(data, folder / f"{name}.new", metadata={"format": "pt"})
        os.replace(folder / f"{name}.new", folder / name)
    if count > 1:
        weight_map = {slot.name: name for name, shard in zip(names, shards, strict=True) for slot in shard}
        total = sum(tensor_of(model, slot).nbytes for shard in shards for slot in shard)
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
                    "leaves its folder", "name files beside the index", field=name, file=str(folder / INDEX)
                )
        return [folder / name for name in names]
    if not (folder / SINGLE).exists():
        raise FileNotFoundError(f"{folder}: neither {SINGLE} nor {INDEX} is there")
    return [folder / SINGLE]


def _shapes(file: Path) -> dict[str, list[int]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"not a whole safetensors file: {error}", "fetch it again", file=str(file)) from None


def _check(
    model: NativeDecoder, wanted: dict[str, Slot], shapes: dict[str, tuple[Path, list[int]]], folder: Path
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
    for name, slot in wanted.items():
        file, shape = shapes[name]
        expected = list(tensor_of(model, slot).shape)
        if shape != expected:
            problem = f"shape {shape} where the config needs {expected}"
            raise InputError(
                problem, "use the config.json that belongs to these weights", field=name, file=str(file)
            )


def _is_tied_head(model: NativeDecoder, name: str) -> bool:
    return model.config.tie_word_embeddings and name == "lm_head.weight"


def _split(model: NativeDecoder, rows: Iterable[Slot], max_shard_bytes: int) -> Iterable[list[Slot]]:
    shard: list[Slot] = []
    size = 0
    for slot in rows:
        nbytes = tensor_of(model, slot).nbytes
        if shard and size + nbytes > max_shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(slot)
        size += nbytes
    yield shard


def _write_json(path: Path, data: dict[str, Any]) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(new, path)
