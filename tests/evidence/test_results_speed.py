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
    without_update = list[str]()
    for row in lines(speed.RUN_HERE):
        tokens = row["micro_batch"] * row["micro_batches"] * 1024
        step_ms, once_ms = (
            median(each[1:] or each) if each else 0.0 for each in (row["step_ms"], row.get("update_ms"))
        )
        # Of a step with fewer micro-batches the whole one is computed: the update comes once in it.
        full_ms = once_ms + (step_ms - once_ms) * 524288 / tokens
        is_known = tokens == 524288 or "update_ms" in row
        without_update += [] if is_known else [row["model"]]
        assert row["full_step_ms"] == pytest.approx(full_ms, rel=2e-4 if is_known else 0.005)
        assert row["tokens_per_s"] == pytest.approx(524288 / row["full_step_ms"] * 1e3, rel=1e-4)
    assert without_update == ["qwen2.5-7b"]  # Of this run the update's time was not kept.


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
    steps = {one["name"]: one["tokens_per_s"] for one in lines("step-kernels/step-kernels-fused.jsonl")}
    sentence = (
        r"on the host \(# tokens/s\), where four without were faster "
        r"\(# with the same kernels, # with today's\)"
    )
    four = whole["7b fp8 of four sequences"]["measurement"]["tokens_per_s"]
    check(PAGE, sentence, (measured["7b fp8"]["measurement"]["tokens_per_s"], steps["7b-fp8-fused"], four))

    three = whole["7b fp8"]["measurement"]["tokens_per_s"]
    too_fast = (
        100 * (variants("speed/one-h100-fp8-predicted.jsonl")["7b fp8"]["estimate"]["tokens_per_s"] / three)
        - 100
    )
    before = measured["7b fp8 on the card"]["measurement"]
    waits = {name: 100 * (1 - one["measurement"]["busy"]) for name, one in whole.items()}
    sentence = (
        "Of 7B with three sequences it is # % too fast: the GPU waited for the host # % of the time, "
        "that of the others not at all. The same sequences with SwiGLU's kernels alone had waited # % and "
        "reached # tokens/s"
    )
    values = (too_fast, waits.pop("7b fp8"), 100 * (1 - before["busy"]), before["tokens_per_s"])
    check(PAGE, sentence, values)
    assert max(waits.values()) < 0.1


def test_the_page_states_how_far_the_longest_sequence_is_off() -> None:
    (predicted,), (again,), (measured,) = (
        lines(f"speed/long-h200-{kind}.jsonl") for kind in ("predicted", "again", "measured")
    )
    before, now = (
        100 * (one["estimate"]["tokens_per_s"] / measured["measurement"]["tokens_per_s"] - 1)
        for one in (predicted, again)
    )
    time = predicted["estimate"]["time"]
    share = 100 * time["attention_s"] / predicted["estimate"]["step_s"]
    sentence = "was predicted # % too slow: its attention, # % of the predicted time"
    check(PAGE, sentence, (-before, share))
    check(PAGE, "so predicted again, it is # % too fast", (now,))
    assert predicted["estimate"]["phases"] == measured["measurement"]["phases"]


def test_the_page_states_how_far_steps_with_long_attention_are_off() -> None:
    predicted, measured = (
        variants(f"speed/attention-h200-{kind}.jsonl") for kind in ("predicted", "measured")
    )
    pairs = [(predicted[name]["estimate"], measured[name]["measurement"]) for name in predicted]
    off = [100 * abs(one["tokens_per_s"] / found["tokens_per_s"] - 1) for one, found in pairs]
    assert len(off) == 4
    check(PAGE, "in tokens/s at most # % off, their peaks to the byte", (max(off),))
    for peak in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes"):
        assert all(one[peak] == found[peak] for one, found in pairs), peak


def test_the_page_states_how_far_steps_with_pytorchs_attention_are_off() -> None:
    predicted, measured = (variants(f"speed/sdpa-h200-{kind}.jsonl") for kind in ("predicted", "measured"))
    pairs = [(predicted[name]["estimate"], measured[name]["measurement"]) for name in predicted]
    off = [100 * abs(one["tokens_per_s"] / found["tokens_per_s"] - 1) for one, found in pairs]
    assert len(off) == 5
    check(PAGE, "were predicted by that rule first: at most # % off", (max(off),))
    field = "peak_allocated_bytes"
    exact = [one[field] == found[field] for one, found in pairs]
    assert exact.count(True) == 4
    (low,) = (one[field] - found[field] for one, found in pairs if one[field] != found[field])
    check(PAGE, "That of 4B was # MiB too low", (-low / 2**20,))
    again = variants("speed/sdpa-h200-again.jsonl")
    for name, one in again.items():
        estimate, measurement = one["estimate"], measured[name]["measurement"]
        assert estimate["phases"] == measurement["phases"], name
        assert estimate["peak_reserved_bytes"] == measurement["peak_reserved_bytes"], name


def test_the_log_states_which_steps_with_strided_norms_are_to_the_byte() -> None:
    predicted, measured = (variants(f"speed/norms-h200-{kind}.jsonl") for kind in ("predicted", "measured"))
    assert len(predicted) == 5
    differ = dict[str, int]()
    for name, one in predicted.items():
        estimate, measurement = one["estimate"], measured[name]["measurement"]
        for peak in ("peak_reserved_bytes", "peak_device_bytes"):
            assert estimate[peak] == measurement[peak], name
        if estimate["phases"] != measurement["phases"]:
            differ[name] = measurement["peak_allocated_bytes"] - estimate["peak_allocated_bytes"]
    assert list(differ.values()) == [320 * 1024]
