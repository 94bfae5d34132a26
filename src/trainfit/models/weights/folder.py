"""Folders of safetensors in the Hugging Face layout: where they are, their files, their tensors' headers.

A folder has ``model.safetensors``, or shards and ``model.safetensors.index.json``. Only headers are read
here, which costs milliseconds. Pickled weights are never read. No torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from trainfit.catalog.load import model
from trainfit.catalog.names import find_model
from trainfit.spec import files
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.plain_data import parse_json, read_config

FIELD = "model.weights"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
MAX_INDEX_BYTES = 100 * 10**6
FETCH_AGAIN = "fetch it again"
WANTED = (SINGLE, "model-*.safetensors", INDEX, "config.json")
"""Files of a repository that are fetched."""


class Header(NamedTuple):
    """One tensor of a folder; ``dtype`` as safetensors names it, such as ``BF16``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightsFolder:
    """The tensors of a folder by name; ``named``: the recipe's value."""

    path: Path
    named: str
    tensors: dict[str, Header]


def located(weights: str, *, fetch: bool) -> Path | None:
    """Return the folder that ``model.weights`` names; of the Hub's repositories, the cached one.

    Args:
        weights: a folder, or a repository on the Hub (``owner/name``, also ``owner/name@revision``).
        fetch: fetch a repository that is not cached. False: return None for it.

    Raises:
        InputError: no such folder, or the repository cannot be fetched.
    """
    path = Path(weights).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        remedy = f"name its folder, {path.parent}"
        raise InputError("a file, and no folder of weights", remedy, field=FIELD, value=weights)
    owner, _, name = weights.partition("/")
    if weights.startswith((".", "/", "~")) or "\\" in weights or not owner or not name or "/" in name:
        known = find_model(weights)
        repository = next(iter(model(known).hub), "owner/name") if known else "owner/name"
        remedy = f"name a folder with config.json and model.safetensors, or a repository such as {repository}"
        raise InputError("no such folder", remedy, field=FIELD, value=weights)
    return _of_hub(weights, fetch=fetch)


def open_folder(path: Path, named: str) -> WeightsFolder:
    """Read the headers of a folder's files.

    Raises:
        InputError: no safetensors, a shard that is missing, or a file that is not whole.
    """
    tensors: dict[str, Header] = {}
    for file in _files(path):
        for name, header in headers(file):
            if name in tensors:
                problem = f"is in two files, {tensors[name].file.name} too"
                raise InputError(problem, "remove the file of another save", field=name, file=str(file))
            tensors[name] = header
    return WeightsFolder(path, named, tensors)


def adapter_base(path: Path) -> str | None:
    """Return the base model's weights that a folder with an adapter names; None: it holds no adapter alone.

    Raises:
        InputError: it names none.
    """
    if not (path / ADAPTER).is_file() or (path / SINGLE).is_file() or (path / INDEX).is_file():
        return None
    config = read_config(path / ADAPTER_CONFIG) if (path / ADAPTER_CONFIG).is_file() else {}
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(base, str) or not base:
        remedy = "add the folder or the repository of its base model"
        field = "base_model_name_or_path"
        raise InputError(
            "the adapter names no base model", remedy, field=field, file=str(path / ADAPTER_CONFIG)
        )
    revision = config.get("revision")
    is_pinned = isinstance(revision, str) and bool(revision) and not Path(base).is_dir()
    return f"{base}@{revision}" if is_pinned else base


def own_config(path: Path) -> dict[str, Any]:
    """Return the content of the folder's config.json; empty without one."""
    file = path / "config.json"
    found = read_config(file) if file.is_file() else {}
    return found if isinstance(found, dict) else {}


def _of_hub(weights: str, *, fetch: bool) -> Path | None:
    from huggingface_hub import snapshot_download

    repository, _, revision = weights.partition("@")
    wanted: Any = {"repo_id": repository, "revision": revision or None, "allow_patterns": list(WANTED)}
    try:
        path = Path(snapshot_download(**wanted, local_files_only=True))
        if not _missing(path):
            return path
    except (OSError, ValueError):  # Not in the cache, or no name of a repository.
        pass
    if not fetch:
        return None
    try:
        return Path(snapshot_download(**wanted))
    except Exception as error:  # The Hub's own errors, and those of httpx.
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        problem = f"neither in the local cache nor to be fetched: {reason}"
        remedy = "check its name and the network, or name a folder with config.json and model.safetensors"
        raise InputError(problem, remedy, field=FIELD, value=weights) from error


def _missing(path: Path) -> str:
    """Return the first file that a folder lacks; empty: its weights are whole."""
    try:
        return next((file.name for file in _files(path) if not file.is_file()), "")
    except InputError:
        return SINGLE


def _files(path: Path) -> list[Path]:
    """Return the folder's files of weights; as in transformers, a single one goes before an index."""
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    index_file = path / INDEX
    if not index_file.is_file():
        raise _without_safetensors(path)
    index = parse_json(files.read_text(index_file, MAX_INDEX_BYTES), str(index_file))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        problem = "no map from tensor to file"
        raise InputError(problem, FETCH_AGAIN, field="weight_map", file=str(index_file))
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            remedy = "name files in the folder of the index"
            raise InputError("leaves its folder", remedy, field=name, file=str(index_file))
        if not (path / name).is_file():
            remedy = "fetch the folder again"
            raise InputError("this shard of its index is missing", remedy, field=name, file=str(index_file))
    return [path / name for name in names]


def _without_safetensors(path: Path) -> InputError:
    """Return the error of a folder without weights that are read, by what it has."""
    problem, remedy = f"it has neither {SINGLE} nor {INDEX}", "name a folder of transformers' save_pretrained"
    pickled = [
        file.name for file in sorted(path.glob("*")) if file.suffix in (".bin", ".pt", ".pth", ".ckpt")
    ]
    if (path / ADAPTER).is_file() or (path / ADAPTER_CONFIG).is_file():
        problem, remedy = "it holds an adapter, and no model", "name its base model's folder"
    elif pickled:
        problem = f"its weights are pickled ({pickled[0]}), and a pickle can run code, so none is read"
        remedy = "convert them to safetensors: load them with transformers, then save_pretrained"
    elif any(path.glob("*.gguf")):
        problem = "its weights are in GGUF, which is not read"
        remedy = "name the folder of the original weights"
    elif any(path.glob("consolidated*.safetensors")):
        problem = "its weights are in another layout than transformers' (consolidated.safetensors)"
    return InputError(problem, remedy, field=FIELD, value=str(path))


def headers(file: Path) -> Iterator[tuple[str, Header]]:
    """Yield name and header of each tensor of a file.

    Raises:
        InputError: it is no safetensors file, or not whole.
    """
    try:
        with safe_open(str(file), framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open gives no iterator)
                one = opened.get_slice(name)
                yield name, Header(file, str(one.get_dtype()), tuple(one.get_shape()))
    except SafetensorError as error:
        raise InputError(f"not a whole safetensors file: {error}", FETCH_AGAIN, file=str(file)) from None
