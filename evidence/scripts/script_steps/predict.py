"""Predict steps of the scripts on an H100: ``python -m evidence.scripts.script_steps.predict OUT.jsonl``."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from evidence.scripts.script_steps import scripts

GPU = "h100-sxm"
STEPS = 3


def predicted(name: str, size: str) -> dict[str, Any]:
    """Return what ``trainfit.trace`` says of a script."""
    import trainfit

    begun = time.perf_counter()
    found = trainfit.trace(lambda: scripts.named(name)(STEPS + 1, size == "small"), gpu=GPU, steps=STEPS)
    assert found.time is not None
    assert found.code is not None
    return {
        "step_s": found.step_s, "time": found.time.model_dump(),
        "bounds": {name: one.model_dump() for name, one in found.bounds.items()},
        "num_recomputed_blocks": found.code.num_recomputed_blocks,
        "num_launches": found.code.num_launches, "num_python_calls": found.code.num_python_calls,
        "peak_allocated_bytes": found.peak_allocated_bytes, "peak_reserved_bytes": found.peak_reserved_bytes,
        "versions": found.versions, "seconds": round(time.perf_counter() - begun, 1),
    }  # fmt: skip


def main() -> None:
    """Predict each script, whole and with a small batch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("into", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--size", choices=("small", "whole"), nargs="*", default=["small", "whole"])
    options = parser.parse_args()
    from trainfit.spec.provenance import commit, now

    scripts.quiet()
    every = [script.__name__ for script in (*scripts.LEARNED, *scripts.HELD_OUT, *scripts.HELD_OUT_AGAIN)]
    for name in options.only or every:
        for size in options.size:
            row = {"script": name, "size": size, "commit": commit(), "made_at": now()}
            row |= {"predicted": predicted(name, size)}
            with options.into.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            print(name, size, json.dumps(row["predicted"])[:300], flush=True)


if __name__ == "__main__":
    main()
