"""What docs/tasks/ shows of recorded runs."""

import json

from page_claims import ROOT, check
from trainfit.spec.units import GIB

OUT_OF_MEMORY = "docs/tasks/out-of-memory.md"


def test_the_error_is_that_of_a_recorded_run() -> None:
    shown = (ROOT / OUT_OF_MEMORY).read_text("utf-8").partition("```text\n")[2].partition("```")[0]
    message = " ".join(shown.split()).removeprefix("torch.OutOfMemoryError: ")
    lines = (ROOT / "evidence/records/h200-measured.jsonl").read_text("utf-8").splitlines()
    (record,) = [one for one in map(json.loads, lines) if message in (one["measurement"]["message"] or "")]
    recipe = record["recipe"]
    assert (recipe["model"]["config"], recipe["precision"]) == ("qwen2.5-7b", "bf16")
    batch = recipe["batch"]
    check(OUT_OF_MEMORY, "Qwen2.5 7B with # x # tokens on an H200", (batch["micro"], batch["seq"]))
    check(
        OUT_OF_MEMORY,
        "had measured a peak of # GiB before the error",
        (record["measurement"]["peak_allocated_bytes"] / GIB,),
    )
