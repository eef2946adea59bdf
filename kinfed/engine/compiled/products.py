"""Products of small matrices where they lie in memory, compiled: from tiles (kinfed.engine.compiled.tiles) to whole
matrices.

Matrices are addresses of float32, with distances between rows counted in numbers.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from kinfed.engine.compiled.tiles import dot_tile, outer_tile, turned_tile
from kinfed.engine.compiled.vector_code import pointer_to_floats

# Of what is read again and again while the other matrix passes by: a quarter of a cache of the second level.
PANEL_BYTES = 128 << 10
PANEL = 16  # columns of the widest tile

# A tile more is a function more to compile: rows and columns that are left over go into a few sizes.
_DOT_34, _DOT_32, _DOT_31 = (dot_tile(3, n) for n in (4, 2, 1))
_DOT_52, _DOT_51 = (dot_tile(5, n) for n in (2, 1))
_DOT_14, _DOT_12, _DOT_11 = (dot_tile(1, n) for n in (4, 2, 1))
_WIDE_6, _WIDE_4, _WIDE_1 = (outer_tile(m, 2) for m in (6, 4, 1))
_EDGE_6, _EDGE_4, _EDGE_1 = (outer_tile(m, 1, masked=True) for m in (6, 4, 1))


@njit(nogil=True)
def products_of_rows(m, n, k, a, a_row, b, b_row, c, c_row):
    """C [m, n] = A [m, k] B', of rows of A and rows of B [n, k]. Rows by three, and as many by five as make that come
    out even, as in batches of ten and twenty: in tiles of one row each addition waits for the one before."""
    fives = -m % 3
    in_fives = 5 * fives if 5 * fives <= m else 0
    i = 0
    while i < in_fives:
        j = 0
        while j < n:
            left, right, out = a + 4 * i * a_row, b + 4 * j * b_row, c + 4 * (i * c_row + j)
            if n - j >= 2:
                _DOT_52(left, a_row, right, b_row, k, out, c_row)
                j += 2
            else:
                _DOT_51(left, a_row, right, b_row, k, out, c_row)
                j += 1
        i += 5
    j = 0
    while j < n:
        columns = 4 if n - j >= 4 else 2 if n - j >= 2 else 1
        i = in_fives
        while i < m:
            rows = 3 if m - i >= 3 else 1
            left, right, out = a + 4 * i * a_row, b + 4 * j * b_row, c + 4 * (i * c_row + j)
            if rows == 3:
                if columns == 4:
                    _DOT_34(left, a_row, right, b_row, k, out, c_row)
                elif columns == 2:
                    _DOT_32(left, a_row, right, b_row, k, out, c_row)
                else:
                    _DOT_31(left, a_row, right, b_row, k, out, c_row)
            elif columns == 4:
                _DOT_14(left, a_row, right, b_row, k, out, c_row)
            elif columns == 2:
                _DOT_12(left, a_row, right, b_row, k, out, c_row)
            else:
                _DOT_11(left, a_row, right, b_row, k, out, c_row)
            i += rows
        j += columns


@njit(nogil=True, inline="always")
def _outer(rows, wide, out, c_row, left, a_row, a_step, right, b_row, k, factor, width):
    """The tile of so many rows, of PANEL columns, or of `width` up to 8."""
    if wide:
        if rows == 6:
            _WIDE_6(out, c_row, left, a_row, a_step, right, b_row, k, factor, width)
        elif rows == 4:
            _WIDE_4(out, c_row, left, a_row, a_step, right, b_row, k, factor, width)
        else:
            _WIDE_1(out, c_row, left, a_row, a_step, right, b_row, k, factor, width)
    elif rows == 6:
        _EDGE_6(out, c_row, left, a_row, a_step, right, b_row, k, factor, width)
    elif rows == 4:
        _EDGE_4(out, c_row, left, a_row, a_step, right, b_row, k, factor, width)
    else:
        _EDGE_1(out, c_row, left, a_row, a_step, right, b_row, k, factor, width)


@njit(nogil=True)
def add_products(m, n, k, scale, a, a_row, a_step, b, b_row, c, c_row):
    """C [m, n] += scale * A [m, k] B [k, n], with A[i, k] at a + i * a_row + k * a_step: A may be transposed."""
    factor = np.float32(scale)
    panel = max(64, PANEL_BYTES // (64 * max(k, 1)) * 16)
    for begin in range(0, n, panel):
        end = min(n, begin + panel)
        i = 0
        while i < m:
            rows = 6 if m - i >= 6 else 4 if m - i >= 4 else 1
            left = a + 4 * i * a_row
            j = begin
            while j < end:
                right, out, width = b + 4 * j, c + 4 * (i * c_row + j), min(8, end - j)
                wide = end - j >= PANEL
                _outer(rows, wide, out, c_row, left, a_row, a_step, right, b_row, k, factor, width)
                j += PANEL if wide else 8
            i += rows


@njit(nogil=True)
def turn(m, n, a, a_row, c, c_row):
    """C [n, m] = A [m, n]'."""
    left, out = carray(pointer_to_floats(a), m * a_row), carray(pointer_to_floats(c), n * c_row)
    for i in range(0, m, 8):
        for j in range(0, n, 8):
            if m - i >= 8 and n - j >= 8:
                turned_tile(a + 4 * (i * a_row + j), a_row, c + 4 * (j * c_row + i), c_row)
            else:
                for row in range(i, min(m, i + 8)):
                    for column in range(j, min(n, j + 8)):
                        out[column * c_row + row] = left[row * a_row + column]


@njit(nogil=True)
def pack(k, n, b, b_row, b_step, panels):
    """B [k, n] as panels [n / 16, k, 16], whose last columns may be anything, for `add_panel_products`; B[k, j] lies at
    b + k * b_step + j * b_row: one of these distances is 1."""
    for j in range(0, n, PANEL):
        out, columns = panels + 4 * j * k, min(PANEL, n - j)
        if b_step == 1:
            turn(columns, k, b + 4 * j * b_row, b_row, out, np.int64(PANEL))
        else:
            source, target = carray(pointer_to_floats(b), k * b_step), carray(pointer_to_floats(out), k * PANEL)
            for row in range(k):
                for column in range(columns):
                    target[row * PANEL + column] = source[row * b_step + j + column]


@njit(nogil=True)
def add_panel_products(m, n, k, scale, a, a_row, panels, c, c_row):
    """C [m, n] += scale * A [m, k] B [k, n], with B in panels: where B is used many times, as fast as the processor
    multiplies."""
    factor, block = np.float32(scale), max(6, PANEL_BYTES // (24 * max(k, 1)) * 6)
    for begin in range(0, m, block):
        end = min(m, begin + block)
        j = 0
        while j < n:
            wide, inside, width = n - j >= PANEL, j % PANEL, np.int64(min(8, n - j))
            right, i = panels + 4 * ((j - inside) * k + inside), begin
            while i < end:
                rows = 6 if end - i >= 6 else 4 if end - i >= 4 else 1
                left, out = a + 4 * i * a_row, c + 4 * (i * c_row + j)
                _outer(rows, wide, out, c_row, left, a_row, np.int64(1), right, np.int64(PANEL), k, factor, width)
                i += rows
            j += PANEL if wide else 8
