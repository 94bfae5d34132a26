"""Seconds and memory that explain takes for a generated memory snapshot, such as one of a gigabyte.

    python -m evidence.scripts.large_snapshot OUT.jsonl [--events 3400000]

Generates a pickle shaped as PyTorch's (8 to 45 frames a stack, 4,000 stacks, lists that no two events share),
explains it in a process of its own, and appends a line. No GPU is needed. 3,400,000 give 0.93 GB.
"""

import argparse
import json
import pickle
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainfit.spec.provenance import commit, now

MEASURE = """
import json, resource, sys, time
from pathlib import Path
from trainfit.explanation.snapshot.explain import explain_snapshot
begin = time.monotonic()
found = explain_snapshot(Path(sys.argv[1]))
print(json.dumps({
    "events": found.snapshot.num_events, "wall_s": time.monotonic() - begin,
    "processor_s": time.process_time(),
    "highest_resident_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
}))
"""


def events(count: int) -> list[dict[str, Any]]:
    """Return allocations and frees: ``count`` requests, of which each free is two events."""
    chance = random.Random(0)
    file = "/usr/lib/site-packages/lib/module{}.py"
    frames = [{"name": f"forward{i}", "filename": file.format(i % 97), "line": i} for i in range(3000)]
    begins = chance.choices(range(2700), k=4000)
    stacks = [[frames[min(2999, at + 7 * j)] for j in range(chance.randint(8, 45))] for at in begins]
    live: list[tuple[int, int]] = []
    found: list[dict[str, Any]] = []
    address = 0x7F0000000000

    def add(action: str, address: int, size: int, number: int) -> None:
        found.append({
            "action": action, "addr": address, "size": size, "stream": 0, "time_us": number,
            "compile_context": "N/A", "user_metadata": "", "frames": list(chance.choice(stacks)),
        })  # fmt: skip

    for number in range(count):
        if live and chance.random() < 0.5:
            freed = live.pop(-chance.randint(1, min(50, len(live))))
            for action in ("free_requested", "free_completed"):
                add(action, *freed, number)
        else:
            size = chance.choice((512, 4096, 1 << 20, 6 << 20))
            address += size
            live.append((address, size))
            add("alloc", address, size, number)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--events", type=int, default=3_400_000, help="requests")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.pickle"
        with path.open("wb") as file:
            pickle.dump({"segments": [], "device_traces": [events(options.events)]}, file)
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True
        )
        line = {
            "created_at": now(),
            "commit": commit(),
            "bytes": path.stat().st_size,
            **json.loads(done.stdout),
        }
    with options.out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(line)


if __name__ == "__main__":
    main()
