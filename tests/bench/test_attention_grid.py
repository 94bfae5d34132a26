"""``trainfit bench attention_grid``: kernels of a shape by turns, and how they compare."""

import math
from itertools import product
from typing import Any

import pytest
import torch

from bench_rows import tiny_bench
from trainfit.bench.experiments import attention_grid
from trainfit.bench.experiments.attention_grid import Turns, cases, rule_of, side_by_side, summary
from trainfit.bench.harness.runner import run
from trainfit.bench.workloads import attention
from trainfit.bench.workloads.attention import PASSES
from trainfit.cli.text import bench as text


def test_the_grid_has_each_head_size_at_each_length_with_32k_tokens_and_heads_by_four() -> None:
    shapes = list(cases("full"))
    sizes = {(shape[0].head, shape[0].seq) for shape in shapes}
    assert sizes == set(product((64, 128, 256, 512), (1024, 2048, 8192, 16384)))
    for shape in shapes:
        names = [case.body for case in shape]
        assert names == (["ours", "efficient"] if shape[0].head > 256 else ["ours", "cudnn", "flash"])
        for case in shape:
            assert case.batch * case.seq == 32768
            assert case.heads * case.head == 2048
            assert case.kv_heads is not None
            assert case.heads == 4 * case.kv_heads
            assert case.point["kv_heads"] == case.kv_heads
    rests = [rule_of(shape).rest_s for shape in shapes]
    assert min(rests) == pytest.approx(0.02, rel=0.5)
    assert max(rests) < 0.3


def test_kernels_take_turns_and_each_sample_begins_with_another() -> None:
    marks: list[str] = []
    runs: Any = {name: lambda lap: (lap("forward"), lap("backward")) for name in ("a", "b", "c")}
    turns = Turns(runs)
    for _ in range(4):
        turns(marks.append)
    assert [mark.split()[0] for mark in marks[::2]] == [*"abc", *"bca", *"cab", *"abc"]
    assert marks[:2] == ["a forward", "a backward"]


def test_each_pass_is_compared_with_the_fastest_other_kernel() -> None:
    result = run("attention_grid", device="cpu", form="tiny")
    timed = [row for row in result.rows if "body" in row.point]
    assert {(row.point["seq"], row.point["body"], row.point["pass"]) for row in timed} == set(
        product((64, 50), ("ours", "pytorch"), PASSES)
    )
    compared = {
        (row.point["seq"], row.point["which"]): row.numbers for row in result.rows if "which" in row.point
    }
    assert set(compared) == set(product((64, 50), PASSES))
    for row in timed:
        assert row.times is not None
        assert row.point["kv_heads"] == 1
        at = compared[row.point["seq"], str(row.point["pass"])]
        assert at[str(row.point["body"])] == row.numbers["tflops_per_s"]
    for numbers in compared.values():
        assert numbers["of_fastest"] == pytest.approx(float(numbers["ours"]) / float(numbers["pytorch"]))
    (both,) = [row.numbers for row in result.rows if row.point.get("summary") == "both"]
    ratios = [float(numbers["of_fastest"]) for (_, which), numbers in compared.items() if which == "both"]
    assert both["geometric_mean"] == pytest.approx(math.sqrt(math.prod(ratios)))


def test_the_summary_counts_what_is_behind() -> None:
    found = summary([2.0, 0.5, 0.95, 0.9])
    assert found == {
        "geometric_mean": pytest.approx((2.0 * 0.5 * 0.95 * 0.9) ** 0.25),
        "least": 0.5,
        "points": 4,
        "behind": 1,
    }


def test_a_kernel_that_this_device_lacks_leaves_the_others_their_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
        raise RuntimeError("No available kernel.")

    own = attention.body
    monkeypatch.setattr(attention, "body", lambda name: forward if name == "flash" else own(name))
    monkeypatch.setitem(attention_grid.BODIES, "tiny", ("flash", "ours"))
    rows = list(side_by_side(tiny_bench(), next(cases("tiny"))))
    assert [(row.point["body"], row.times is not None) for row in rows] == [("flash", False)] * 3 + [
        ("ours", True)
    ] * 3
    assert rows[0].message == "RuntimeError: No available kernel."
    monkeypatch.setitem(attention_grid.BODIES, "tiny", ("flash",))
    assert {row.status for row in side_by_side(tiny_bench(), next(cases("tiny")))} == {"failed"}


def test_one_point_is_selected_and_the_tables_are_narrow(capsys: pytest.CaptureFixture[str]) -> None:
    result = run("attention_grid", device="cpu", form="tiny", only={"seq": ["50"]})
    assert {row.point["seq"] for row in result.rows if "seq" in row.point} == {50}
    text.show(result)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_grouped_heads_are_the_same_function_in_every_body() -> None:
    case = attention.Case("ours", "fp32", 2, 4, 37, 16, is_causal=True, kv_heads=1)
    q, k, v, _ = (x.detach() for x in attention.tensors(case, torch.device("cpu")))
    assert (q.shape[1], k.shape[1]) == (4, 1)
    wanted = attention.written_out(q, k.expand_as(q), v.expand_as(q), True)
    for name in ("ours", "pytorch"):
        torch.testing.assert_close(attention.body(name)(q, k, v, True), wanted)
