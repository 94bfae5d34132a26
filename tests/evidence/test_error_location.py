"""The words that say where a kernel's result is wrong."""

from typing import Any

import torch
from torch import Tensor

from evidence.scripts.kernels import attention_candidates as candidates
from evidence.scripts.kernels.attention_candidates import Candidate
from evidence.scripts.kernels.error_location import where_wrong
from trainfit.kernels.flash_attention.hopper.launch import GroupsBackward


def test_right_results_give_no_text() -> None:
    wanted = torch.randn(1, 2, 130, 64)
    assert where_wrong("dq", wanted + 0.01, wanted, 0.02) == ""


def test_heads_tiles_and_shares_are_named() -> None:
    wanted = torch.randn(2, 3, 200, 128)
    found = wanted.clone()
    found[1, 2, 64:128] *= 2
    found[0, 1, 192:, 64:] = 0
    text = where_wrong("dq", found, wanted, 1e-3)
    for words in ("1,2 1(2.00)", "0,1 3(0.", "2 heads"):
        assert words in text
    off = (found != wanted).sum(), ((found - wanted).abs() > 1e-3).sum()
    assert text.startswith(f"dq: {off[1]} of {wanted.numel()} entries")
    assert off[1] > 0.99 * off[0]


def test_what_is_no_number_is_wrong() -> None:
    wanted = torch.ones(1, 1, 64, 64)
    found = wanted.clone()
    found[0, 0, 5, 7] = float("nan")
    text = where_wrong("dk", found, wanted, 1.0)
    for words in ("1 of 4096 entries", "1 not numbers", "(0, 0, 5, 7)"):
        assert words in text


def test_a_check_goes_on_behind_a_wrong_shape(monkeypatch) -> None:
    """Only dq of the causal cases lacks its first head; those shapes are named, nothing of dk and dv."""

    def tensors(b: int, h: int, k: int, n: int, m: int, d: int, growing: bool = False) -> tuple[Tensor, ...]:
        shapes = ((b, h, n, d), (b, k, m, d), (b, k, m, d), (b, h, n, d))
        return tuple(torch.randn(shape, dtype=torch.bfloat16) for shape in shapes)

    def exact(tensors: tuple[Tensor, ...], is_causal: bool) -> tuple[Tensor, ...]:
        exact: Any = candidates._exact
        return exact(tensors, is_causal, torch.float64)["backward"]

    def prepared(candidate: Candidate, tensors: tuple[Tensor, ...], is_causal: bool):
        dq, dk, dv = (x.bfloat16() for x in exact(tensors, is_causal))
        dq[:, 0] *= not is_causal
        return lambda: (dq, dk, dv)

    monkeypatch.setattr(candidates, "_tensors", tensors)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(candidates, "_prepared", prepared)
    monkeypatch.setattr(
        candidates, "_public", lambda name, direction, tensors, causal: lambda: exact(tensors, causal)
    )
    monkeypatch.setattr(candidates, "LENGTHS", {64: 100})
    row = candidates.check(Candidate("backward", 64, GroupsBackward(2, 4)))
    wrong = row["error"].split(" | ")
    assert [line.partition(": ")[0] for line in wrong] == [
        *(f"wrong at {shape} causal True" for shape in candidates.SMALL),
        *(f"wrong at the timed shape, run {turn}, against flash" for turn in range(3)),
    ]
    assert all(": dq: " in line for line in wrong)
    assert "0,0 0(0.00) 1(0.00)" in wrong[0]
    assert len(row["errors"]) == 6
