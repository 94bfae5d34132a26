"""Give records of ``evidence/records/`` the ids that their recipes have today.

``python -m evidence.scripts.accuracy.reidentify`` reads every file there, adds to ``previous-ids.txt`` the
recipes whose records have ids of the form of before 2026-11-26 (``spec.provenance``), and replaces these ids
in every line, also in those that name a recipe without holding it. Digests are made anew. A Record keeps its
old id as ``previous_id``. Lines without an old id stay as they are, so a second run changes nothing.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from evidence.scripts.accuracy import held_out
from trainfit.spec.errors import InputError
from trainfit.spec.files import write_text
from trainfit.spec.provenance import DIGEST, digest_of, ids_of_today, with_id_of_today

HEAD = "# Id until 2026-11-26, id of today: the recipes of records that were made before; sorted.\n"
KEPT = ("recipe", "planned", "previous_id")
"""Fields whose content stays as it was written."""


def main() -> int:
    """Re-identify the files of ``evidence/records/``; the exit code is 0."""
    folder = held_out.RESULTS
    files = sorted(folder.rglob("*.jsonl"))
    known = held_out.previous_ids() if held_out.PREVIOUS_IDS.is_file() else {}
    ids = known | {before: now for file in files for before, now in _found(file).items()}
    changed = [file for file in files if _write(file, "".join(_lines(file, ids)))]
    causes = folder / "causes.toml"
    named = re.sub("[0-9a-f]{16}", lambda one: ids.get(one[0], one[0]), causes.read_text("utf-8"))
    changed += [causes] if _write(causes, named) else []
    _write(held_out.PREVIOUS_IDS, HEAD + "".join(f"{before} {ids[before]}\n" for before in sorted(ids)))
    print(f"{len(ids)} recipes, {len(ids) - len(known)} of them new; {len(changed)} files changed")
    return 0


def _found(file: Path) -> dict[str, str]:
    """Return previous id -> id of today of the recipes that a file's records hold under an old id."""
    found: dict[str, str] = {}
    for line in file.read_text("utf-8").splitlines():
        data = json.loads(line)
        ids = ids_of_today(data.get("recipe"), data.get("planned"))
        found |= ids if data.get("recipe_id") in ids else {}
    return found


def _lines(file: Path, ids: dict[str, str]) -> list[str]:
    lines: list[str] = []
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        data = json.loads(line)
        if DIGEST in data and data[DIGEST] != digest_of(data):
            raise InputError("the digest is not that of the content", "restore it", file=f"{file}:{number}")
        is_record = data.get("kind") in ("predict", "measure", "train")
        now = _replaced(with_id_of_today(data) if is_record else data, ids)
        if now != data:
            now |= {DIGEST: digest_of(now)} if now.pop(DIGEST, None) else {}
            separators = (",", ":") if line.startswith(('{"kind":', '{"recipe_id":"')) else None
            line = json.dumps(now, ensure_ascii=False, separators=separators)
        lines.append(f"{line}\n")
    return lines


def _replaced(data: Any, ids: dict[str, str]) -> Any:
    if isinstance(data, dict):
        return {name: one if name in KEPT else _replaced(one, ids) for name, one in data.items()}
    if isinstance(data, list):
        return [_replaced(one, ids) for one in data]
    return ids.get(data, data) if isinstance(data, str) else data


def _write(file: Path, text: str) -> bool:
    """Write a text file if it would change; return whether it did."""
    if file.is_file() and file.read_text("utf-8") == text:
        return False
    write_text(file, text)
    return True


if __name__ == "__main__":
    sys.exit(main())
