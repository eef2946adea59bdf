"""Products of small matrices where they lie in memory, compiled: tiles in the registers of the processor, written in
LLVM's own vectors of eight numbers, or sixteen, and whole matrices made of them.

    dot_tile(m, n)            C[i, j] = Σ_k A[i, k] B[j, k]                   i < m, j < n
    outer_tile(m, vectors)    C[i, j] += scale Σ_k A[i, k] B[k, j]            i < m, j < 16 vectors
    turned_tile               C[j, i] = A[i, j]                               i, j < 8
    slope_tile                s = Σ_i g[i] (b[i] - a[i])

Batches of local training are small, and packing matrices for a library's product takes as long as the product: these
tiles read them where they are. The order in which a number of the result is summed depends neither on the tile it falls
into nor on how wide the processor's vectors are. Arguments are addresses of float32, and distances between rows counted
in numbers.
"""

from collections.abc import Callable

import numpy as np
from llvmlite.binding import get_host_cpu_features
from numba import carray, njit

from kinfed.engine.compiled.vector_code import LANES, ZERO, Value, emitted, floats_at, whole_number

# Of what is read again and again while the other matrix passes by: a quarter of a cache of the second level.
PANEL_BYTES = 128 << 10
PANEL = 16  # columns of a tile of one vector: one register of AVX-512, two of AVX, four of SSE or NEON
# Columns of the widest tile, and the most of the narrowest. Twelve registers of sums hide how long an addition takes;
# with AVX-512 these are twice as wide, and there are 32 of them.
WIDEST, EDGE = (2 * PANEL, PANEL) if get_host_cpu_features().get("avx512f") else (PANEL, LANES)


def dot_tile(m: int, n: int) -> Callable[..., None]:
    """Sums of lane l are over k = l, l + 8, ...; then lanes are added in pairs."""

    @emitted(f"dot_{m}_{n}")
    def tile(emit, builder, a, a_row, b, b_row, k, c, c_row):
        a_rows = [emit.row(emit.pointer(a), a_row, i) for i in range(m)]
        b_rows = [emit.row(emit.pointer(b), b_row, j) for j in range(n)]

        def products(at: Value, sums: list[Value], mask: Value | None) -> list[Value]:
            lefts, changed = [emit.load(emit.at(row, at), mask) for row in a_rows], list(sums)
            for j, row in enumerate(b_rows):  # one at a time: m + m n + 1 vectors are in registers
                right = emit.load(emit.at(row, at), mask)
                for i, left in enumerate(lefts):
                    changed[i * n + j] = emit.multiply_add(left, right, sums[i * n + j])
            return changed

        sums = emit.over(k, [ZERO] * (m * n), products)
        for i in range(m):
            row = emit.row(emit.pointer(c), c_row, i)
            for j in range(n):
                builder.store(emit.sum_of_lanes(sums[i * n + j]), emit.at(row, whole_number(j)))

    return tile


def outer_tile(m: int, vectors: int, masked: bool = False) -> Callable[..., None]:
    """A[i, k] lies at a + i * a_row + k * a_step, and the columns of B's second vector `apart` from those of the first;
    a `masked` tile of one vector of EDGE has `width` columns only."""

    @emitted(f"outer_{m}_{vectors}{'_masked' * masked}", real="scale", lanes=EDGE if masked else PANEL)
    def tile(emit, builder, c, c_row, a, a_row, a_step, b, b_row, k, scale, width, apart):
        mask = emit.first_lanes(width) if masked else None
        left, right, target = emit.pointer(a), emit.pointer(b), emit.pointer(c)

        def products(at: Value, sums: list[Value]) -> list[Value]:
            row, column = emit.at(right, builder.mul(at, b_row)), emit.at(left, builder.mul(at, a_step))
            rights = [emit.load(emit.row(row, apart, v), mask) for v in range(vectors)]
            changed = []
            for i in range(m):  # one at a time: m vectors + vectors + 1 are in registers
                factor = emit.broadcast(builder.load(emit.row(column, a_row, i)))
                changed += [emit.multiply_add(factor, rights[v], sums[i * vectors + v]) for v in range(vectors)]
            return changed

        sums = emit.loop(k, 1, [emit.zero] * (m * vectors), products)
        amount = emit.broadcast(scale)
        for i in range(m):
            for v in range(vectors):
                place = emit.at(emit.row(target, c_row, i), whole_number(PANEL * v))
                emit.store(emit.multiply_add(amount, sums[i * vectors + v], emit.load(place, mask)), place, mask)

    return tile


@emitted("turned_8_8")
def turned_tile(emit, builder, a, a_row, c, c_row):
    """Rows become columns in three exchanges of halves, between vectors 1, 2 and 4 apart."""
    rows = [emit.load(emit.row(emit.pointer(a), a_row, i), None) for i in range(LANES)]
    for distance in (1, 2, 4):
        low = [lane if not lane & distance else lane - distance + LANES for lane in range(LANES)]
        high = [lane + distance if not lane & distance else lane + LANES for lane in range(LANES)]
        for i in range(LANES):
            if not i & distance:
                one, other = rows[i], rows[i + distance]
                rows[i], rows[i + distance] = emit.mixed(one, other, low), emit.mixed(one, other, high)
    for j, row in enumerate(rows):
        emit.store(row, emit.row(emit.pointer(c), c_row, j), None)


@emitted("slope")
def slope_tile(emit, builder, g, a, b, count, out):
    """Four vectors of sums, which do not wait for each other; the numbers behind the last four go to the first one."""
    pointers = [emit.pointer(address) for address in (g, a, b)]
    whole = builder.and_(count, whole_number(-4 * LANES))

    def term(at: Value, total: Value, mask: Value | None) -> Value:
        along, base, toward = (emit.load(emit.at(pointer, at), mask) for pointer in pointers)
        return emit.multiply_add(along, builder.fsub(toward, base), total)

    def four(at: Value, sums: list[Value]) -> list[Value]:
        return [term(builder.add(at, whole_number(LANES * v)), total, None) for v, total in enumerate(sums)]

    def one(at: Value, sums: list[Value]) -> list[Value]:
        left = emit.first_lanes(builder.sub(rest, at))
        return [term(builder.add(whole, at), sums[0], left)]

    sums = emit.loop(whole, 4 * LANES, [ZERO] * 4, four)
    rest = builder.sub(count, whole)
    (first,) = emit.loop(rest, LANES, sums[:1], one)
    total = builder.fadd(builder.fadd(first, sums[1]), builder.fadd(sums[2], sums[3]))
    builder.store(emit.sum_of_lanes(total), emit.pointer(out))


# A tile more is a function more to compile: rows and columns that are left over go into a few sizes.
_DOT_34, _DOT_32, _DOT_31 = (dot_tile(3, n) for n in (4, 2, 1))
_DOT_52, _DOT_51 = (dot_tile(5, n) for n in (2, 1))
_DOT_14, _DOT_12, _DOT_11 = (dot_tile(1, n) for n in (4, 2, 1))
_WIDEST_6, _WIDEST_4, _WIDEST_1 = (outer_tile(m, WIDEST // PANEL) for m in (6, 4, 1))
_WIDE_6, _WIDE_4, _WIDE_1 = (outer_tile(m, 1) for m in (6, 4, 1))
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
def _outer(rows, columns, out, c_row, left, a_row, a_step, right, b_row, k, factor, apart):
    """The tile of `rows` rows, of WIDEST or PANEL columns, or of up to EDGE."""
    width = np.int64(min(EDGE, columns))
    if columns == WIDEST:
        if rows == 6:
            _WIDEST_6(out, c_row, left, a_row, a_step, right, b_row, k, factor, width, apart)
        elif rows == 4:
            _WIDEST_4(out, c_row, left, a_row, a_step, right, b_row, k, factor, width, apart)
        else:
            _WIDEST_1(out, c_row, left, a_row, a_step, right, b_row, k, factor, width, apart)
    elif columns == PANEL:
        if rows == 6:
            _WIDE_6(out, c_row, left, a_row, a_step, right, b_row, k, factor, width, apart)
        elif rows == 4:
            _WIDE_4(out, c_row, left, a_row, a_step, right, b_row, k, factor, width, apart)
        else:
            _WIDE_1(out, c_row, left, a_row, a_step, right, b_row, k, factor, width, apart)
    elif rows == 6:
        _EDGE_6(out, c_row, left, a_row, a_step, right, b_row, k, factor, width, apart)
    elif rows == 4:
        _EDGE_4(out, c_row, left, a_row, a_step, right, b_row, k, factor, width, apart)
    else:
        _EDGE_1(out, c_row, left, a_row, a_step, right, b_row, k, factor, width, apart)


@njit(nogil=True, inline="always")
def _rows(left):
    """Rows of the next tile, of those that are left: 8 and 9 are two tiles of four (and one), where six would leave
    tiles of one, which take as long."""
    return 6 if left >= 6 and left != 8 and left != 9 else 4 if left >= 4 else 1


@njit(nogil=True, inline="always")
def _columns(left):
    """Columns of the next tile, of those that are left."""
    return WIDEST if left >= WIDEST else PANEL if left >= PANEL else min(EDGE, left)


@njit(nogil=True)
def add_products(m, n, k, scale, a, a_row, a_step, b, b_row, c, c_row):
    """C [m, n] += scale * A [m, k] B [k, n], with A[i, k] at a + i * a_row + k * a_step: A may be transposed."""
    factor = np.float32(scale)
    panel = max(64, PANEL_BYTES // (128 * max(k, 1)) * 32)
    for begin in range(0, n, panel):
        end = min(n, begin + panel)
        i = 0
        while i < m:
            rows = _rows(m - i)
            left = a + 4 * i * a_row
            j = begin
            while j < end:
                columns, right, out = _columns(end - j), b + 4 * j, c + 4 * (i * c_row + j)
                _outer(rows, columns, out, c_row, left, a_row, a_step, right, b_row, k, factor, np.int64(PANEL))
                j += columns
            i += rows


@njit(nogil=True)
def turn(m, n, a, a_row, c, c_row):
    """C [n, m] = A [m, n]'."""
    left, out = carray(floats_at(a), m * a_row), carray(floats_at(c), n * c_row)
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
            source, target = carray(floats_at(b), k * b_step), carray(floats_at(out), k * PANEL)
            for row in range(k):
                for column in range(columns):
                    target[row * PANEL + column] = source[row * b_step + j + column]


@njit(nogil=True)
def add_panel_products(m, n, k, scale, a, a_row, panels, c, c_row):
    """C [m, n] += scale * A [m, k] B [k, n], with B in panels: for a B that is used many times."""
    factor, block, one, beside = np.float32(scale), max(6, PANEL_BYTES // (24 * max(k, 1)) * 6), np.int64(1), PANEL * k
    for begin in range(0, m, block):
        end = min(m, begin + block)
        j = 0
        while j < n:
            columns, inside, i = _columns(n - j), j % PANEL, begin
            right = panels + 4 * ((j - inside) * k + inside)
            while i < end:
                rows = _rows(end - i)
                left, out = a + 4 * i * a_row, c + 4 * (i * c_row + j)
                _outer(rows, columns, out, c_row, left, a_row, one, right, np.int64(PANEL), k, factor, beside)
                i += rows
            j += columns
