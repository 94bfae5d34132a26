"""The kernels' page says what the rows say, and the committed one is made of the committed rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels import cases as kernel_cases
from benchmarks.kernels import loss_and_blocks as kernel_benchmark
from trainfit.report.kernel_page import STORIES, main, page
from trainfit.spec.errors import InputError

ROOT = Path(__file__).parents[2]
MACHINE = {
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "made_at": "2026-11-21T10:00:00+00:00",
    "commit": "0123456789abcdef",
}


def timed(case: str, way: str, part: str, ms: float, **more: Any) -> dict[str, Any]:
    told = {
        "case": case,
        "size": "8 rows",
        "way": way,
        "part": part,
        "ms": ms,
        "ms_p10": ms,
        "ms_p90": 1.1 * ms,
    }
    return MACHINE | told | {"extra_bytes": 10**9} | more


def wrong(way: str, ratio: float) -> dict[str, Any]:
    told = {"case": "loss", "way": way, "part": "errors", "error": [0.001 * ratio], "eager": [0.001]}
    return MACHINE | told | {"of_eager": ratio}


def test_goals_are_met_or_missed() -> None:
    rows = [
        wrong("ours fused", 1.25),
        timed("loss", "compiled", "both", 40.0, tflops=660.0),
        timed("loss", "ours fused", "both", 44.5, tflops=592.8),
        timed("norm", "compiled", "forward", 0.2, gb_per_s=100.0),
        timed("norm", "ours", "forward", 0.1, gb_per_s=200.0),
    ]
    text = page(rows)
    assert "at least 600 TFLOP/s | 592.8 | **missed** |" in text
    assert "| with less than 1.5 GB of extra memory | 1.000 GB | met |" in text
    assert "| no error over twice eager PyTorch's | 1.25 (loss, ours fused) | met |" in text
    assert "| compiled | forward and backward | 40.000 | 10.0 % | 660.0 |" in text
    assert "RMSNorm, forward: faster than compiled | 0.100 against 0.200 ms | met |" in text
    assert "| ours | forward | 0.100 | 10.0 % | 200 | 1.000 |" in text
    assert "NVIDIA H200, torch 2.11.0, commit 0123456789ab, 2026-11-21." in text
    assert "Size: 8 rows." in text


def test_where_eager_was_not_run_there_is_no_ratio() -> None:
    text = page([wrong("ours", 1.25), wrong("ours, over 2^31 logits", 0.0) | {"eager": []}])
    assert "| 0.1 % | 1.25 |" in text
    assert "| ours, over 2^31 logits | 0 % | – | – |" in text


def test_the_page_says_whether_clocks_were_watched() -> None:
    old = timed("norm", "ours", "forward", 1.0)
    new = old | {"samples": 12, "discarded": 3, "status": "done"}
    assert "The clocks were not watched" in page([old])
    assert "held the clocks down are thrown away" in page([new])
    assert "| samples | thrown away |" in page([new])
    assert "| 12 | 3 |" in page([new])
    assert "thrown away |" not in page([old])


def test_a_goal_without_a_number_is_missed() -> None:
    failed = MACHINE | {
        "case": "loss",
        "size": "8",
        "way": "ours fused",
        "part": "failed",
        "message": "both: throttled: x",
    }
    assert "| linear cross-entropy, forward and backward | no number: see below | **missed** |" in page(
        [failed]
    )


def test_a_way_that_failed_is_told() -> None:
    failed = MACHINE | {
        "case": "norm",
        "size": "8 rows",
        "way": "ours",
        "part": "failed",
        "message": "no *such* kernel",
    }
    assert "- ours failed: no \\*such\\* kernel" in page([failed])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "rows of 0 runs"),
        ([wrong("ours", 1.0), wrong("ours", 1.0) | {"commit": "f"}], "rows of 2 runs"),
        ([wrong("ours", 1.0) | {"gpu": "cpu"}], "rows of a CPU"),
        ([timed("softmax", "ours", "forward", 1.0)], "no words for this case"),
    ],
)
def test_what_makes_no_page_is_refused(rows: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        page(rows)


def test_a_line_that_is_no_row_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(wrong("ours", 1.0)) + "\n{\n")
    assert main([str(file)]) == 65
    assert "rows.jsonl:2" in capsys.readouterr().err


def test_every_case_of_the_benchmark_has_words() -> None:
    import torch

    makers = [lambda *a, make=make: make(*a, False) for make in kernel_cases.CASES] + [*kernel_cases.TUNINGS]
    cases = [make(kernel_benchmark.TINY, torch.device("cpu"), torch.bfloat16) for make in makers]
    assert {case.name for case in cases} == STORIES.keys()
    assert all(case.size for case in cases)


def test_the_page_in_the_docs_is_made_of_the_rows_in_results(tmp_path: Path) -> None:
    into = tmp_path / "kernels.md"
    assert main([str(ROOT / "results/kernels/h200.jsonl"), "--into", str(into)]) == 0
    assert into.read_text() == (ROOT / "docs/results/kernels.md").read_text(), (
        "run the command that the page's top names"
    )
