"""The shapes of ``attention`` and ``flash`` in full form, and what ends a series of lengths."""

from collections.abc import Iterator
from itertools import product

import pytest

from trainfit.bench.experiments import attention, flash
from trainfit.bench.harness.bench import Bench
from trainfit.bench.harness.runner import run
from trainfit.bench.harness.timing import Rule
from trainfit.bench.workloads.attention import Case, rule_of
from trainfit.spec.bench import BenchRow

SIZES = (16, 32, 64, 128)
DTYPES = ("fp32", "bf16")


def shapes(name: str, **only: list[str]) -> set[tuple[object, ...]]:
    """Dtype, heads, head size, length and body of every point in full form."""
    rows = run(name, device="cpu", form="full", limit_s=0, only=only or None).rows
    assert {row.status for row in rows} == {"not-run"}
    return {tuple(row.point[key] for key in ("dtype", "heads", "head", "seq", "body")) for row in rows}


def test_attention_has_every_head_size_at_every_length() -> None:
    found = shapes("attention")
    assert found >= set(product(DTYPES, [1], SIZES, (256, 1024, 4096, 8192, 16384), ("eager", "ours")))
    assert found >= set(product(DTYPES, [1], SIZES, (256, 16384), ("compiled",)))
    assert found >= set(product(DTYPES, [1], [64], (256, 1024, 4096, 8192, 16384, 65536), ("compiled",)))
    compiled = [shape for shape in found if shape[-1] == "compiled"]
    assert len(compiled) < 30  # Each takes seconds to compile.


def test_flash_has_every_head_size_at_every_power_of_two() -> None:
    lengths = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    found = shapes("flash", heads=["1"])
    assert found == set(product(DTYPES, [1], SIZES, lengths, ("ours", "pytorch")))
    assert shapes("flash", heads=["1"], dtype=["fp32"]) == {shape for shape in found if shape[0] == "fp32"}


@pytest.mark.parametrize("seq", ["64", "128"])
def test_one_length_alone_can_be_asked_for(seq: str) -> None:
    rows = run("attention", device="cpu", form="tiny", only={"seq": [seq]}).rows
    assert {(row.point["seq"], row.point["body"]) for row in rows} == {
        (int(seq), "eager"),
        (int(seq), "ours"),
    }
    assert all(row.times is not None for row in rows)


@pytest.mark.parametrize("status", ["out-of-memory", "not-run", "failed", "throttled", "refused"])
def test_only_memory_ends_a_ladder(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(bench: Bench, case: Case, rule: Rule) -> Iterator[BenchRow]:
        hit = (case.dtype, case.head, case.seq, case.body) == ("fp32", 64, 4096, "eager")
        known = {"status": status, "message": "why"} if hit else {"status": "done"}
        yield BenchRow.model_validate({"point": case.point, **known})

    monkeypatch.setattr(attention, "rows", rows)
    points = [row.point for row in run("attention", device="cpu", form="full").rows]
    eager = [
        point["seq"]
        for point in points
        if (point["dtype"], point["head"], point["body"]) == ("fp32", 64, "eager")
    ]
    assert max(map(int, eager)) == (4096 if status == "out-of-memory" else 65536)
    one_head = {(point["dtype"], point["head"]) for point in points if point["heads"] == 1}
    assert one_head == set(product(DTYPES, SIZES))


def kernel_shapes(mask: str) -> set[tuple[object, ...]]:
    rows = run("attention", device="cpu", form="full", limit_s=0, only={"mask": [mask]}).rows
    assert {row.point["heads"] for row in rows} == {16}
    assert {int(row.point["batch"]) * int(row.point["seq"]) for row in rows} == {8192}
    assert {row.point["causal"] for row in rows} == {mask == "none"}
    return {tuple(row.point[key] for key in ("dtype", "head", "seq", "body")) for row in rows}


def test_attention_has_masks_by_each_kernel_that_takes_them_and_heads_of_256() -> None:
    lengths = (1024, 2048, 4096, 8192)
    masked = set(product(["bf16"], (64, 128, 256), lengths, ("cudnn", "efficient")))
    assert kernel_shapes("additive") == masked | set(
        product(["fp32"], (64, 128, 256), lengths, ["efficient"])
    )
    assert kernel_shapes("boolean") == {shape for shape in masked if shape[2] in (2048, 8192)}
    wide = set(product(["bf16"], [256], lengths, ("cudnn", "flash", "efficient", "ours")))
    narrow = set(product(["bf16"], (64, 128), lengths, ["efficient"]))
    assert kernel_shapes("none") == wide | narrow | set(product(["fp32"], [256], lengths, ["efficient"]))


def test_a_long_case_in_fp32_has_time_for_its_few_samples() -> None:
    """3.8 TFLOP: two to four seconds a run where the kernel makes one to two TFLOP/s."""
    (longest,) = (
        case
        for case in flash.cases("full")
        if (case.dtype, case.heads, case.head, case.seq, case.body) == ("fp32", 1, 128, 65536, "ours")
    )
    rule = rule_of(longest)
    assert rule.min_samples == rule.max_samples == 6
    assert rule.cap_s >= 6 * (4 + rule.rest_s)
