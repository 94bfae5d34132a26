"""Adafactor's passes over a matrix in Triton: sums of squares, norm of the update, update.

Shapes: parameter and gradient are [b, r, c], contiguous (b: leading dimensions, such as experts). Arithmetic
is in fp32, and every sum has a fixed order, so results are deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trainfit.kernels.stochastic_rounding.triton import rounded_at_random


@triton.jit
def row_squares_kernel(G, P, ROW, PARTS, num_columns, BLOCK: tl.constexpr):
    """Compute one row per program: the mean of the gradient's squares and the sum of the parameter's."""
    row = tl.program_id(0).to(tl.int64)
    squares, weights = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_columns, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < num_columns
        g = tl.load(G + row * num_columns + columns, mask=inside, other=0.0).to(tl.float32)
        p = tl.load(P + row * num_columns + columns, mask=inside, other=0.0).to(tl.float32)
        squares += g * g
        weights += p * p
    tl.store(ROW + row, tl.sum(squares, 0) / num_columns)
    tl.store(PARTS + row, tl.sum(weights, 0))


@triton.jit
def column_squares_kernel(
    G, COLUMN, num_rows, num_columns, ROWS_A_PART: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Compute the sums of squares of ROWS_A_PART rows in BLOCK_C columns of one matrix per program."""
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    part, matrix = tl.program_id(1), tl.program_id(2).to(tl.int64)
    squares = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for first in range(0, ROWS_A_PART, BLOCK_R):
        rows = part * ROWS_A_PART + first + tl.arange(0, BLOCK_R)
        at = (matrix * num_rows + rows[:, None]) * num_columns + columns[None, :]
        inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
        g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
        squares += g * g
    at = (matrix * tl.num_programs(1) + part) * num_columns + columns
    tl.store(COLUMN + at, tl.sum(squares, 0), mask=columns < num_columns)


@triton.jit
def _update(g, row, column_var, mean, eps_squared):
    """Return the gradient over the root of its factored second moment."""
    variance = row * column_var / mean
    return g * tl.rsqrt(tl.maximum(variance, eps_squared))


@triton.jit
def update_squares_kernel(
    G, ROW, COLUMN, MEAN, PARTS, eps_squared, num_rows, num_columns, BLOCK: tl.constexpr
):
    """Compute one row per program: the sum of the update's squares."""
    row = tl.program_id(0).to(tl.int64)
    matrix = row // num_rows
    row_var, mean = tl.load(ROW + row), tl.load(MEAN + matrix)
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_columns, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < num_columns
        g = tl.load(G + row * num_columns + columns, mask=inside, other=0.0).to(tl.float32)
        column_var = tl.load(COLUMN + matrix * num_columns + columns, mask=inside, other=1.0)
        u = _update(g, row_var, column_var, mean, eps_squared)
        squares += u * u
    tl.store(PARTS + row, tl.sum(squares, 0))


@triton.jit(do_not_specialize=["seed"])
def apply_kernel(
    P, G, ROW, COLUMN, MEAN, SIZE, keep, eps_squared, seed, num_rows, num_columns,
    STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row per program: p = keep * p - size * update; STOCHASTIC rounds to bf16."""
    row = tl.program_id(0).to(tl.int64)
    matrix = row // num_rows
    row_var, mean, size = tl.load(ROW + row), tl.load(MEAN + matrix), tl.load(SIZE)
    for first in range(0, num_columns, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < num_columns
        at = row * num_columns + columns
        g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
        p = tl.load(P + at, mask=inside, other=0.0).to(tl.float32)
        column_var = tl.load(COLUMN + matrix * num_columns + columns, mask=inside, other=1.0)
        p = p * keep - size * _update(g, row_var, column_var, mean, eps_squared)
        if STOCHASTIC:
            p = rounded_at_random(p, seed, at)
        tl.store(P + at, p.to(P.dtype.element_ty), mask=inside)
