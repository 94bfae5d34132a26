"""Files that a field names: read with the config where they are there, else judged by their names."""

import os
import re
from pathlib import Path
from typing import Any

from trainfit.integrations.importers.base import Reading
from trainfit.integrations.importers.source import Source, read

MAX_UP = 4
"""Folders, from the config's own, in which a file is looked for: examples name it from their repository."""
STAGE = re.compile(r"(?i)(?:zero|z|stage)[_-]?(?:stage[_-]?)?([0-3])(?![0-9])")


def refer(reading: Reading, name: str, file: str, tool: str) -> None:
    """Queue the file that a field names; where it is not there, note what its name says."""
    if tool in reading.draft.tools:  # The user gave the file.
        reading.idle([name])
        return
    there = next((path for path in _places(reading, file) if path.is_file()), None)
    if there is not None:
        reading.accounted(name)
        reading.draft.idle.append(reading.full(name))
        reading.draft.referred.append((read(str(there)), tool))
        return
    found = STAGE.search(Path(file).name)
    if tool == "deepspeed" and found is not None:
        reading.know("sharding", {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}[int(found[1])], name)
        note = "the file is not here; its stage by its name; name it as a further FILE"
        if "offload" in file.lower():
            is_all = not re.search(r"(?i)offload[_-]?param", file) or "all" in file.lower()
            if int(found[1]) == 3:
                reading.draft.know("offload_params", True, reading.full(name), file)
            elif is_all:
                reading.draft.know("offload_optimizer", True, reading.full(name), file)
        reading.draft.suppose(reading.full(name), f"ZeRO {found[1]}", note)
        return
    note = "the file is not here; name it as a further FILE"
    reading.leave(name, ("memory", "time"), note)


def inline(reading: Reading, name: str, values: dict[str, Any], tool: str) -> None:
    """Queue a mapping that stands in the config itself, as if it were a file of another tool."""
    reading.accounted(name)
    reading.draft.idle.append(reading.full(name))
    reading.draft.referred.append((Source(f"{reading.source.path} [{name}]", values=values), tool))


def _places(reading: Reading, file: str) -> list[Path]:
    if "\0" in file:
        return []
    folders = [
        Path(),
        *[reading.source.folder.absolute(), *reading.source.folder.absolute().parents][:MAX_UP],
    ]
    return [Path(os.path.normpath(folder / file)) for folder in folders]
