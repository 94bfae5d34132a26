"""Digests of the records."""

import json

from evidence.scripts.tables.joined import RESULTS
from trainfit.spec.provenance import DIGEST, digest_of


def test_each_line_with_a_digest_is_what_was_written() -> None:
    count, changed = 0, list[str]()
    for file in sorted(RESULTS.rglob("*.jsonl")):
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
            row = json.loads(line)
            if isinstance(row, dict) and DIGEST in row:
                count += 1
                changed += [f"{file.name}:{number}"] * (digest_of(row) != row[DIGEST])
    assert count > 4000
    assert not changed
