"""The kernels' benchmark runs whole in tiny form, and on a GPU its errors are within twice eager PyTorch's."""

import json
from pathlib import Path

import pytest
import torch

from trainfit.measure import kernel_benchmark, kernel_cases
from trainfit.measure.kernel_cases import Case


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
    wrong = [row["of_eager"] for row in rows if row["part"] == "errors"]
    assert len(wrong) == 12
    assert max(wrong) <= 2


def test_flops_are_the_three_products():
    cpu = torch.device("cpu")
    case = kernel_cases.loss(kernel_benchmark.TINY, cpu, torch.bfloat16, False)
    assert case.flops == 3 * 2 * 40 * 130 * 16


def test_a_way_that_fails_is_told_and_the_others_go_on():
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    cpu = torch.device("cpu")
    case = Case(
        "one", (torch.ones(2),), torch.exp, {"broken": broken, "eager": torch.exp}, parts=("forward",)
    )
    rows = list(kernel_benchmark.rows_of(case, kernel_benchmark.Clock.of(cpu)))
    assert [(row["way"], row["part"]) for row in rows] == [("broken", "failed"), ("eager", "forward")]
    assert "no such kernel" in rows[0]["message"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("make", kernel_cases.CASES, ids=lambda make: make.__name__)
def test_errors_on_a_gpu_are_at_most_twice_eagers(make, dtype: torch.dtype):
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
