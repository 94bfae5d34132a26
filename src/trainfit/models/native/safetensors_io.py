"""Save the weights of a NativeDecoder in the Hugging Face layout, in the form that transformers reads.

One shard at a time is copied to a new file, which replaces the old one when complete.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor

from trainfit.models.native.decoder import NativeDecoder
from trainfit.models.weights.folder import INDEX
from trainfit.models.weights.layout import layout


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


def _write_json(path: Path, data: dict[str, Any]) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(new, path)
