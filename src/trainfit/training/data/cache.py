"""Tokenized data kept in the cache's folder, by a hash of its content, tokenizer and options.

A run's folder links its files (copies them on another file system), so that a second run of the same data
reads no text and takes no more disk. Data of the Hub and synthetic data are not kept: their content is not
read ahead.
"""

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

from trainfit.spec.errors import InputError
from trainfit.spec.files import cache_folder
from trainfit.spec.value import canonical_json
from trainfit.training import documents, durable
from trainfit.training.options import TextData, TrainOptions

VERSION = 1
"""Version, raised when equal content would give other tokens."""
MAX_KEPT = 8


def key(identity: dict[str, Any], options: TrainOptions) -> str | None:
    """Return the hash of the data's content, its tokenizer and its options; None: it is not kept."""
    sources = [one for one in (options.data, options.eval_data) if one is not None]
    if not all(isinstance(one, TextData) for one in sources):
        return None
    digest = hashlib.sha256(canonical_json([VERSION, identity, _library_versions()]).encode())
    for source in sources:
        assert isinstance(source, TextData)
        for path in documents.text_files(Path(source.path)):
            digest.update(durable.sha256(path).encode())
    return digest.hexdigest()[:32]


def _library_versions() -> list[str | None]:
    from trainfit.spec.provenance import installed_version

    return [installed_version(name) for name in ("tokenizers", "transformers")]


def _folder(key: str) -> Path:
    return cache_folder() / "tokens" / key


def link(key: str, work: Path) -> bool:
    """Put the files that are kept under ``key`` into ``work``; False: none are, or they are damaged."""
    kept = _folder(key)
    if not kept.is_dir():
        return False
    try:
        durable.check_folder(kept)
        _link_all(kept, work)
    except (InputError, OSError):
        with contextlib.suppress(OSError):
            shutil.rmtree(kept)
        for path in work.iterdir():
            path.unlink()
        return False
    with contextlib.suppress(OSError):
        os.utime(kept)  # The oldest are removed first.
    return True


def keep(key: str, work: Path) -> None:
    """Keep the files of ``work`` under ``key``. A cache that cannot be written is not an error."""
    kept = _folder(key)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with durable.new_folder(kept) as copy:
            _link_all(work, copy)
        others = sorted(kept.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in others[:-MAX_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    except OSError:
        return


def _link_all(source: Path, target: Path) -> None:
    """Link each file but the manifest; copy it where the file system cannot."""
    for path in sorted(source.iterdir()):
        if path.name == durable.MANIFEST:
            continue
        try:
            os.link(path, target / path.name)
        except OSError:
            shutil.copy2(path, target / path.name)
