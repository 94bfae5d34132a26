"""The kernels' benchmark runs in tiny form, and on a GPU its errors are within twice eager PyTorch's."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evidence.scripts.kernels import cases as kernel_cases
from evidence.scripts.kernels import loss_and_blocks as kernel_benchmark
from evidence.scripts.kernels.cases import Case
from trainfit.bench.harness.stopwatch import CpuStopwatch
from trainfit.catalog.load import gpu


def test_tiny_form_has_a_line_for_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    into = tmp_path / "rows.jsonl"
    assert kernel_benchmark.main([str(into), "--tiny"]) == 0
    rows = [json.loads(line) for line in into.read_text().splitlines()]
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
    timed = {(row["case"], row["way"]) for row in rows if "ms" in row}
    for case in ("loss", "norm", "gates", "rotation", "update"):
        assert (case, "eager") in timed
        assert (case, "ours fused" if case == "loss" else "ours") in timed
    assert ("products", "cuBLAS, 4 chunks") in timed
    wrong = {row["way"]: row["of_eager"] for row in rows if row["part"] == "errors" and row["case"] == "loss"}
    assert len(wrong) == 7
    assert max(wrong["ours chunked"], wrong["ours fused"]) < 1.5
    assert wrong["ours fused, 32 chunks"] > 1.5 * wrong["ours fused, 4 chunks"]  # A rounding for each.
    assert len([row for row in rows if row["part"] == "errors"]) == 12


def test_errors_follow_from_the_seed_alone_and_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def norm_off_by(factor: float) -> Callable[..., Case]:
        def make(*arguments: Any) -> Case:
            made = kernel_cases.norm(*arguments)
            return replace(made, ways={"ours": lambda x, w: made.definition(x, w) * factor}, parts=())

        return make

    errors = []
    monkeypatch.setattr(kernel_cases, "TUNINGS", ())
    for index, (factor, code) in enumerate(((1.0, 0), (1.0, 0), (1.01, 1))):
        torch.manual_seed(index)
        monkeypatch.setattr(kernel_cases, "CASES", (norm_off_by(factor),))
        into = tmp_path / "rows.jsonl"
        assert kernel_benchmark.main([str(into), "--tiny"]) == code
        (row,) = map(json.loads, into.read_text().splitlines())
        errors.append(row["eager"])
    assert errors[0] == errors[1]


def test_flops_are_the_three_products():
    cpu = torch.device("cpu")
    case = kernel_cases.loss(kernel_benchmark.TINY, cpu, torch.bfloat16, False)
    assert case.flops == 3 * 2 * 40 * 130 * 16


def test_a_way_that_fails_has_a_row_and_the_others_go_on():
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    cpu = torch.device("cpu")
    case = Case(
        "one", (torch.ones(2),), torch.exp, {"broken": broken, "eager": torch.exp}, parts=("forward",)
    )
    rows = list(kernel_benchmark.rows_of(case, kernel_benchmark.bench_of(cpu, tiny=True)))
    assert [(row["way"], row["part"]) for row in rows] == [("broken", "failed"), ("eager", "forward")]
    assert "no such kernel" in rows[0]["message"]


def ratio(found: torch.Tensor, eager: torch.Tensor) -> float:
    """``of_eager`` of a way that gives ``found``, where eager gives ``eager`` and right is 1."""
    given = torch.ones(eager.shape)
    ways = {"ours": lambda x: found}
    case = Case("one", (given,), lambda x: x if x.dtype == torch.float64 else eager, ways)
    (row,) = kernel_benchmark.errors_of(case)
    return row["of_eager"]


def test_a_single_number_may_be_off_by_its_last_place_and_many_may_not():
    one, many, last = torch.ones(()), torch.ones(9), torch.finfo(torch.float32).eps
    assert ratio(one + last, one) == pytest.approx(2)
    assert ratio(one + 2 * last, one) == pytest.approx(4)
    assert ratio(one + 8 * last, one + 2 * last) == pytest.approx(4)
    assert ratio(many, many) == 0
    assert ratio(many + 6 * last, many + 2 * last) == pytest.approx(3)
    assert ratio(many + last, many) == pytest.approx(2)


def one_case() -> Case:
    ways = {"eager": torch.exp}
    return Case(
        "one", (torch.ones(2),), torch.exp, ways, parts=("forward", "again"),
        bytes_moved={"forward": 8, "again": 8},
    )  # fmt: skip


def test_times_are_the_harness_and_say_how_many_samples() -> None:
    bench = kernel_benchmark.bench_of(torch.device("cpu"), tiny=True)
    first, _ = kernel_benchmark.rows_of(replace(one_case(), parts=("forward", "forward")), bench)
    assert first["ms_p10"] <= first["ms"] <= first["ms_p90"]
    assert bench.rule.min_samples <= first["samples"] <= bench.rule.max_samples
    assert first["gb_per_s"] == pytest.approx(8 / first["ms"] / 1e6)
    assert (first["discarded"], first["extra_bytes"]) == (0, None)
    full = kernel_benchmark.bench_of(torch.device("cpu"), tiny=False)
    assert full.rule.hide
    assert full.rule.flush


def test_held_clocks_and_impossible_times_leave_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = kernel_benchmark.bench_of(torch.device("cpu"), tiny=True)
    bench.gpu = gpu("h200")
    case = replace(one_case(), parts=("forward",), bytes_moved={"forward": 10**15})
    (row,) = kernel_benchmark.rows_of(case, bench)
    assert row["part"] == "failed"
    assert row["message"].startswith("forward: impossible: ")
    monkeypatch.setattr(CpuStopwatch, "throttled", lambda self: ("software power cap",))
    monkeypatch.setattr(CpuStopwatch, "rest", lambda self, seconds: None)
    (row,) = kernel_benchmark.rows_of(replace(one_case(), parts=("forward",)), bench)
    assert row["part"] == "failed"
    assert "throttled: the clocks were held down (software power cap)" in row["message"]
    assert "ms" not in row


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert kernel_benchmark.main([str(tmp_path / "none" / "rows.jsonl"), "--tiny"]) == 65
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("make", kernel_cases.CASES, ids=lambda make: make.__name__)
def test_errors_on_a_gpu_are_at_most_twice_eagers(make, dtype: torch.dtype):
    """The loss is one number: at most one last place, where that is more than twice eager's error."""
    torch.manual_seed(1)
    case = make(kernel_cases.SMALL, torch.device("cuda"), dtype, False)
    rows = list(kernel_benchmark.errors_of(case))
    assert rows
    assert [(row["way"], row["error"], row["eager"]) for row in rows if row["of_eager"] > 2] == []


@pytest.mark.gpu
def test_more_than_two_to_the_31_logits():
    row = kernel_cases.beyond_32_bits(torch.device("cuda"))
    assert row["of_eager"] <= 1
    assert row["losses"][0] == pytest.approx(row["losses"][1], rel=1e-5)
