"""Keep what a replay says of a kept ledger: a later prediction of it replays nothing. No torch here.

The replay is most of the time of a prediction whose ledger is kept: 70B models have 60,000 allocations and
frees in a step of all layers, which are replayed up to nine times.
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from trainfit.ledger.allocator_settings import allocator_settings
from trainfit.ledger.ledger import Ledger
from trainfit.ledger.replay import Peaks
from trainfit.prediction import cache
from trainfit.spec.files import cache_folder, write_bytes
from trainfit.spec.hardware import Gpu
from trainfit.spec.parsing.plain_data import parse_json
from trainfit.spec.result import MemoryBreakdown, Phases
from trainfit.spec.value import canonical_json

ENDING = ".peaks.json"
VALUES = {"phases": Phases, "breakdown": MemoryBreakdown}


def load(ledger: Ledger, gpu: Gpu) -> tuple[Sequence[Peaks], bool] | None:
    """Return the kept peaks of a kept ledger on a GPU, and whether they fit; None: they are not kept."""
    if not ledger.kept_in:
        return None
    path = _path(ledger, gpu)
    try:
        if path.stat().st_mtime_ns < (cache_folder() / ledger.kept_in).stat().st_mtime_ns:
            return None  # The ledger was traced anew.
        data = parse_json(path.read_bytes())
        found = [_read(one) for one in data["peaks"]]
        return (found, bool(data["fits"])) if found else None
    except (OSError, ValueError, LookupError, TypeError):
        return None  # Not kept, or damaged: it is replayed again.


def keep(ledger: Ledger, gpu: Gpu, found: tuple[Sequence[Peaks], bool]) -> None:
    """Keep what a replay of a kept ledger found. A cache that cannot be written is not an error."""
    if not ledger.kept_in:
        return
    peaks, fits = found
    content = canonical_json({"peaks": [_written(one) for one in peaks], "fits": fits})
    with suppress(OSError):
        write_bytes(_path(ledger, gpu), content.encode())
        cache.evict(f"*{ENDING}", cache.MAX_LEDGERS)


def _written(peaks: Peaks) -> dict[str, Any]:
    values = {one.name: getattr(peaks, one.name) for one in fields(Peaks)}
    return values | {name: values[name].model_dump(mode="json") for name in VALUES}


def _read(data: dict[str, Any]) -> Peaks:
    return Peaks(**data | {name: kind(**data[name]) for name, kind in VALUES.items()})


def _path(ledger: Ledger, gpu: Gpu) -> Path:
    segments = allocator_settings(os.environ).expandable_segments
    parts = [ledger.kept_in, gpu.model_dump(mode="json"), cache.estimate_version(), segments]
    name = hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:32]
    return cache_folder() / f"{name}{ENDING}"
