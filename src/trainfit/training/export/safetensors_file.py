"""Write safetensors files tensor by tensor, so that one tensor at a time is in memory.

Format (github.com/huggingface/safetensors): 8 bytes with the header's length, the header as JSON padded with
spaces to a multiple of 8, then the tensors' bytes without gaps.
"""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from trainfit.spec.errors import InputError
from trainfit.spec.files import write_text, writing
from trainfit.training import durable

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""The format's names of dtypes."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor to write: its form, known in advance, and a function that returns its values."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def value(self, name: str) -> Tensor:
        """Return the values in the entry's dtype; InputError if a finite one does not fit in it."""
        tensor = self.read()
        assert tensor.shape == self.shape, f"{name}: {tuple(tensor.shape)} for {tuple(self.shape)}"
        cast = tensor.to(self.dtype)
        is_narrower = cast.is_floating_point() and torch.finfo(cast.dtype).max < torch.finfo(tensor.dtype).max
        if is_narrower and not torch.isfinite(cast).all():
            problem = f"{name} has values beyond the range of {str(self.dtype).removeprefix('torch.')}"
            raise InputError(problem, "use bf16 or fp32", field="dtype", value="fp16")
        return cast


def write_sharded(
    folder: Path,
    entries: Mapping[str, Entry],
    max_shard_bytes: int,
    *,
    stem: str = "model",
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> list[str]:
    """Write ``STEM.safetensors``, or shards and their index where one file would be too large.

    Args:
        advance: called with the bytes of each tensor that is written.

    Returns:
        Names of the files with tensors.
    """
    split = split_state_dict_into_shards_factory(
        dict(entries), get_storage_size=_num_bytes, filename_pattern=stem + "{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )  # fmt: skip
    for file, names in split.filename_to_tensors.items():
        write_file(folder / file, {name: entries[name] for name in names}, advance)
    if split.is_sharded:
        parameters = sum(entry.shape.numel() for entry in entries.values())
        metadata = {"total_parameters": parameters, **split.metadata}
        index = {"metadata": metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        write_text(folder / f"{stem}.safetensors.index.json", durable.as_json(index))
    return list(split.filename_to_tensors)


def write_file(
    path: Path, entries: Mapping[str, Entry], advance: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Write one file. Tensors of wider dtypes come first, so that each begins at a multiple of its size."""
    ordered = sorted(entries.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in ordered:
        start, end = end, end + entry.nbytes
        header[name] = {
            "dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with writing(path), path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, entry in ordered:
            _write_tensor(file, entry.value(name))
            advance(entry.nbytes)


def _write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    if tensor.numel():
        file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _num_bytes(entry: Entry) -> int:
    return entry.nbytes
