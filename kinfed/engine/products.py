"""Products of small matrices where they lie in memory, compiled: from tiles (kinfed.engine.tiles) to whole matrices.

Matrices are addresses of float32, with distances between rows counted in numbers.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from kinfed.engine.tiles import dot_tile, outer_tile
from kinfed.engine.vector_code import pointer_to_floats

# Of the matrix that is read again and again, while the other one passes by: a quarter of a cache of the second level.
PANEL_BYTES = 128 << 10
TURNED_TOGETHER = 16  # rows and columns: a line of the cache each

# A tile more is a function more to compile: rows and columns that are left over go into a few sizes.
_DOT_34, _DOT_32, _DOT_31 = (dot_tile(3, n) for n in (4, 2, 1))
_DOT_14, _DOT_12, _DOT_11 = (dot_tile(1, n) for n in (4, 2, 1))
_WIDE_6, _WIDE_4, _WIDE_1 = (outer_tile(m, 2) for m in (6, 4, 1))
_EDGE_6, _EDGE_4, _EDGE_1 = (outer_tile(m, 1, masked=True) for m in (6, 4, 1))


@njit(nogil=True)
def products_of_rows(m, n, k, a, a_row, b, b_row, c, c_row):
    """C [m, n] = A [m, k] B', of rows of A and rows of B [n, k]."""
    panel = max(3, PANEL_BYTES // (12 * max(k, 1)) * 3)
    for begin in range(0, m, panel):
        rows = min(panel, m - begin)
        _panel_of_rows(rows, n, k, a + 4 * begin * a_row, a_row, b, b_row, c + 4 * begin * c_row, c_row)


@njit(nogil=True)
def _panel_of_rows(m, n, k, a, a_row, b, b_row, c, c_row):
    j = 0
    while j < n:
        columns = 4 if n - j >= 4 else 2 if n - j >= 2 else 1
        i = 0
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
                if end - j >= 16:
                    if rows == 6:
                        _WIDE_6(out, c_row, left, a_row, a_step, right, b_row, k, factor, width)
                    elif rows == 4:
                        _WIDE_4(out, c_row, left, a_row, a_step, right, b_row, k, factor, width)
                    else:
                        _WIDE_1(out, c_row, left, a_row, a_step, right, b_row, k, factor, width)
                    j += 16
                else:
                    if rows == 6:
                        _EDGE_6(out, c_row, left, a_row, a_step, right, b_row, k, factor, width)
                    elif rows == 4:
                        _EDGE_4(out, c_row, left, a_row, a_step, right, b_row, k, factor, width)
                    else:
                        _EDGE_1(out, c_row, left, a_row, a_step, right, b_row, k, factor, width)
                    j += 8
            i += rows


@njit(nogil=True)
def turn(m, n, a, a_row, c, c_row):
    """C [n, m] = A [m, n]', in squares that stay in the cache."""
    left, out = carray(pointer_to_floats(a), m * a_row), carray(pointer_to_floats(c), n * c_row)
    for i in range(0, m, TURNED_TOGETHER):
        below = min(m, i + TURNED_TOGETHER)
        for j in range(0, n, TURNED_TOGETHER):
            for column in range(j, min(n, j + TURNED_TOGETHER)):
                for row in range(i, below):
                    out[column * c_row + row] = left[row * a_row + column]
