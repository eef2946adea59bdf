"""Tiles of matrix products in the registers of the processor, written in LLVM's own vectors of eight numbers.

    dot_tile(m, n)            C[i, j] = Σ_k A[i, k] B[j, k]                   i < m, j < n
    outer_tile(m, vectors)    C[i, j] += scale Σ_k A[i, k] B[k, j]            i < m, j < 8 vectors
    turned_tile               C[j, i] = A[i, j]                               i, j < 8
    slope_tile                 s = Σ_i g[i] (b[i] - a[i])

Batches of local training are small, and packing matrices for a library's product takes as long as the product: these
tiles read them where they are. What a number of the result is summed from, and in which order, depends neither on the
tile it falls into nor on how wide the processor's vectors are. Arguments are addresses and distances between rows,
counted in numbers (float32).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from kinfed.engine.compiled.vector_code import LANES, ZERO, Builder, Emitter, Value, calling, whole_number


def dot_tile(m: int, n: int) -> Callable[..., None]:
    """Sums of lane l are over k = l, l + 8, ...; then lanes are added in pairs."""

    @intrinsic
    def tile(context: Any, a: Any, a_row: Any, b: Any, b_row: Any, k: Any, c: Any, c_row: Any) -> Any:
        def body(builder: Builder, args: list[Value]) -> None:
            emit = Emitter(builder)
            a, a_row, b, b_row, k, c, c_row = args
            a_rows = [emit.row(emit.pointer(a), a_row, i) for i in range(m)]
            b_rows = [emit.row(emit.pointer(b), b_row, j) for j in range(n)]
            whole = builder.and_(k, whole_number(-LANES))

            def products(at: Value, sums: list[Value], mask: Value | None) -> list[Value]:
                lefts, changed = [emit.load(emit.at(row, at), mask) for row in a_rows], list(sums)
                for j, row in enumerate(b_rows):  # one at a time: m + m n + 1 vectors are in registers
                    right = emit.load(emit.at(row, at), mask)
                    for i, left in enumerate(lefts):
                        changed[i * n + j] = emit.multiply_add(left, right, sums[i * n + j])
                return changed

            sums = emit.loop(whole, LANES, [ZERO] * (m * n), lambda at, now: products(at, now, None))
            rest = builder.sub(k, whole)
            sums = emit.loop(rest, LANES, sums, lambda _, now: products(whole, now, emit.first_lanes(rest)))
            place = emit.pointer(c)
            for i in range(m):
                row = emit.row(place, c_row, i)
                for j in range(n):
                    builder.store(emit.sum_of_lanes(sums[i * n + j]), emit.at(row, whole_number(j)))

        return types.void(*[types.intp] * 7), calling(f"kinfed_dot_{m}_{n}", body)

    return tile


def outer_tile(m: int, vectors: int, masked: bool = False) -> Callable[..., None]:
    """A[i, k] lies at a + i * a_row + k * a_step; a `masked` tile of one vector has `width` columns only."""

    @intrinsic
    def tile(
        context: Any, c: Any, c_row: Any, a: Any, a_row: Any, a_step: Any, b: Any, b_row: Any, k: Any, scale: Any,
        width: Any,
    ) -> Any:  # fmt: skip
        def body(builder: Builder, args: list[Value]) -> None:
            emit = Emitter(builder)
            c, c_row, a, a_row, a_step, b, b_row, k, scale, width = args
            mask = emit.first_lanes(width) if masked else None
            left, right, target = emit.pointer(a), emit.pointer(b), emit.pointer(c)

            def products(at: Value, sums: list[Value]) -> list[Value]:
                row, column = emit.at(right, builder.mul(at, b_row)), emit.at(left, builder.mul(at, a_step))
                rights = [emit.load(emit.at(row, whole_number(LANES * v)), mask) for v in range(vectors)]
                changed = []
                for i in range(m):  # one at a time: m vectors + vectors + 1 are in registers
                    factor = emit.broadcast(builder.load(emit.row(column, a_row, i)))
                    changed += [emit.multiply_add(factor, rights[v], sums[i * vectors + v]) for v in range(vectors)]
                return changed

            sums = emit.loop(k, 1, [ZERO] * (m * vectors), products)
            amount = emit.broadcast(scale)
            for i in range(m):
                for v in range(vectors):
                    place = emit.at(emit.row(target, c_row, i), whole_number(LANES * v))
                    emit.store(emit.multiply_add(amount, sums[i * vectors + v], emit.load(place, mask)), place, mask)

        name = f"kinfed_outer_{m}_{vectors}{'_masked' * masked}"
        return types.void(*[types.intp] * 8, types.float32, types.intp), calling(name, body)

    return tile


@intrinsic
def turned_tile(context: Any, a: Any, a_row: Any, c: Any, c_row: Any) -> Any:
    """Rows become columns in three exchanges of halves, between vectors 1, 2 and 4 apart."""

    def body(builder: Builder, args: list[Value]) -> None:
        emit = Emitter(builder)
        a, a_row, c, c_row = args
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

    return types.void(*[types.intp] * 4), calling("kinfed_turned_8_8", body)


@intrinsic
def slope_tile(context: Any, g: Any, a: Any, b: Any, count: Any, out: Any) -> Any:
    """Four vectors of sums, which do not wait for each other; the numbers behind the last four go to the first one."""

    def body(builder: Builder, args: list[Value]) -> None:
        emit = Emitter(builder)
        g, a, b, count, out = args
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

    return types.void(*[types.intp] * 5), calling("kinfed_slope", body)
