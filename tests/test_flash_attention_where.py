"""The words that say where a kernel's result is wrong."""

import torch

from trainfit.kernels.flash_attention_where import where_wrong


def test_right_results_are_not_told() -> None:
    wanted = torch.randn(1, 2, 130, 64)
    assert where_wrong("dq", wanted + 0.01, wanted, 0.02) == ""


def test_heads_tiles_and_shares_are_told() -> None:
    wanted = torch.randn(2, 3, 200, 128)
    found = wanted.clone()
    found[1, 2, 64:128] *= 2
    found[0, 1, 192:, 64:] = 0
    told = where_wrong("dq", found, wanted, 1e-3)
    for words in ("1,2 1(2.00)", "0,1 3(0.", "2 heads"):
        assert words in told
    off = (found != wanted).sum(), ((found - wanted).abs() > 1e-3).sum()
    assert told.startswith(f"dq: {off[1]} of {wanted.numel()} entries")
    assert off[1] > 0.99 * off[0]


def test_what_is_no_number_is_wrong() -> None:
    wanted = torch.ones(1, 1, 64, 64)
    found = wanted.clone()
    found[0, 0, 5, 7] = float("nan")
    told = where_wrong("dk", found, wanted, 1.0)
    for words in ("1 of 4096 entries", "1 not numbers", "(0, 0, 5, 7)"):
        assert words in told
