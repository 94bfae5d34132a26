"""The table of speed: ours from records, the best other beside it."""

import json
from statistics import median
from typing import Any

import pytest

from evidence.scripts.tables import speed
from evidence.scripts.tables.joined import RESULTS
from page_claims import check

PAGE = "evidence/pages/kernels.md"


def test_rows_are_the_fastest_measured_steps_beside_what_ran_here_or_is_cited() -> None:
    rows = {one.work: one for one in speed.every()}
    assert 5 <= len(rows) <= 13
    small, eight_bits = rows["Qwen2.5 0.5B, bf16"], rows["Qwen2.5 0.5B, fp8"]
    assert str(small.tokens_per_s) in (RESULTS / small.made_by.partition(",")[0]).read_text("utf-8")
    assert small.tokens_per_s >= 140_000
    assert (small.other_tokens_per_s, small.is_cited) == (148_988, False)
    assert (eight_bits.other_tokens_per_s, eight_bits.is_cited) == (163_559, False)
    assert rows["Qwen2.5 14B, bf16"].is_cited
    assert f"| {small.ratio:.2f} |" in speed.readme()


def test_llmqs_speed_is_that_of_its_steps() -> None:
    for row in lines(speed.RUN_HERE):
        tokens, step_ms = (
            row["micro_batch"] * row["micro_batches"] * 1024,
            median(row["step_ms"][1:] or row["step_ms"]),
        )
        # What a step does once, whatever its micro-batches.
        once_ms = median(row.get("update_ms", [0.0])[1:] or [0.0])
        full_ms = once_ms + (step_ms - once_ms) * 524288 / tokens
        assert row["full_step_ms"] == pytest.approx(full_ms, rel=0.005)
        assert row["tokens_per_s"] == pytest.approx(524288 / row["full_step_ms"] * 1e3, rel=1e-4)


def test_the_trainer_has_its_fastest_settings() -> None:
    lora, whole, fsdp2 = (one for one in speed.every() if one.other != speed.LLMQ)
    assert (lora.other, round(lora.ratio, 2)) == ("Trainer with Liger", 1.46)
    assert (whole.other, round(whole.ratio, 2)) == ("Trainer, DDP and Liger", 1.22)
    assert round(fsdp2.ratio, 2) == 1.56


def lines(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / file).read_text("utf-8").splitlines()]


def variants(file: str) -> dict[str, dict[str, Any]]:
    return {
        tag.removeprefix("variant:"): one
        for one in lines(file)
        for tag in one["tags"]
        if tag.startswith("variant:")
    }


def test_the_page_states_how_far_predictions_of_the_h100_are_off() -> None:
    predicted, again, measured = (
        variants(f"speed/one-h100-{kind}.jsonl") for kind in ("predicted", "again", "measured")
    )
    off, now = (
        {
            name: 100 * (of[name]["estimate"]["tokens_per_s"] / one["measurement"]["tokens_per_s"] - 1)
            for name, one in measured.items()
        }
        for of in (predicted, again)
    )
    sentence = "the same recipes predicted again were at most # % too fast, 7B in fp8 # %"
    check(PAGE, sentence, (max(value for name, value in now.items() if name != "7b fp8"), now["7b fp8"]))
    in_fp8 = [value for name, value in off.items() if name.endswith("fp8")]
    sentence = "The predictions of one-h100 were # to # % too fast in fp8, and # % for 0.5B in bf16"
    check(PAGE, sentence, (min(in_fp8), max(in_fp8), off["0.5b"]))

    longer = dict[str, float]()
    products = lines("step-kernels/step-products-fused.jsonl")
    for name in {one["name"] for one in products}:
        head = [one for one in products if (one["name"], one["dtype"]) == (name, "bfloat16")]
        took_s, expected_s = (sum(one[key] for one in head) for key in ("measured_s", "expected_s"))
        longer[name.partition("-")[0]] = 100 * (took_s / expected_s - 1)
    sentence = r"took # % \(1.5B\) and # % \(3B\) longer than predicted; those of 7B took as long"
    check(PAGE, sentence, (longer["1.5b"], longer["3b"]))
    assert abs(longer["7b"]) < 1

    whole = variants("speed/one-h100-fp8-measured.jsonl")
    sentence = r"on the host \(# tokens/s\), where four without are faster \(#\)"
    planned, four = (
        one["measurement"]["tokens_per_s"] for one in (measured["7b fp8"], whole["7b fp8 of four sequences"])
    )
    check(PAGE, sentence, (planned, four))

    blind = variants("speed/one-h100-fp8-predicted.jsonl")
    slower = 100 * (
        blind["7b fp8"]["estimate"]["tokens_per_s"] / whole["7b fp8"]["measurement"]["tokens_per_s"] - 1
    )
    waits = {name: 100 * (1 - one["measurement"]["busy"]) for name, one in whole.items()}
    sentence = (
        "7B with three sequences was # % slower than predicted: its GPU waited for the host # % of the time"
    )
    check(PAGE, sentence, (slower, waits.pop("7b fp8")))
    assert max(waits.values()) < 0.1
