"""Sampling in Triton: a program reads the logits of one row, keeps the best score and the softmax's sum."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _largest_and_log_sum(row, v, scale, column_stride, BLOCK: tl.constexpr):
    """Return a row's largest scaled logit, and the logarithm of the sum of exp(logit - largest).

    Apart, because their sum would round differences of logits: those of 50 by 2e-6.
    """
    largest = float("-inf")
    total = 0.0
    for start in range(0, v, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(row + columns.to(tl.int64) * column_stride, mask=columns < v, other=float("-inf"))
        x = x.to(tl.float32) * scale
        new = tl.maximum(largest, tl.max(x, axis=0))
        known = tl.where(new > float("-inf"), new, 0.0)  # A block of -inf alone must not give NaN.
        total = total * tl.exp(largest - known) + tl.sum(tl.exp(x - known), axis=0)
        largest = new
    return largest, tl.log(total)


@triton.jit
def sample_kernel(
    LOGITS, KEYS, LEAST, TOKENS, LOGS, v, scale, row_stride, column_stride,
    NOISE: tl.constexpr, HAS_LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the token with the largest noisy logit and its log-probability."""
    b = tl.program_id(0).to(tl.int64)
    row = LOGITS + b * row_stride
    largest, log_sum = _largest_and_log_sum(  # pyright: ignore[reportGeneralTypeIssues]
        row, v, scale, column_stride, BLOCK
    )
    first = tl.load(KEYS + 2 * b).to(tl.uint32)
    second = tl.load(KEYS + 2 * b + 1).to(tl.uint32)
    best = float("-inf")
    chosen = 0
    logit = 0.0
    for start in range(0, v, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(row + columns.to(tl.int64) * column_stride, mask=columns < v, other=float("-inf"))
        x = x.to(tl.float32) * scale
        scores = x
        if NOISE:
            bits = _mixed(_mixed(columns.to(tl.uint32) + first) ^ second) >> 9
            uniform = (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07
            scores = x - tl.log(-tl.log(uniform))
        if HAS_LEAST:
            kept = ((x - largest) - log_sum >= tl.load(LEAST + b)) | (x == largest)
            scores = tl.where(kept, scores, float("-inf"))
        here = tl.max(scores, axis=0)
        if here > best:
            best = here
            at = tl.argmax(scores, axis=0)
            chosen = start + at
            logit = tl.sum(tl.where(tl.arange(0, BLOCK) == at, x, 0.0), axis=0)
    tl.store(TOKENS + b, chosen.to(tl.int64))
    tl.store(LOGS + b, (logit - largest) - log_sum)
