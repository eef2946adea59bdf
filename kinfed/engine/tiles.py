"""Tiles of matrix products in the registers of the processor, written in LLVM's own vectors of eight numbers.

    dot_tile(m, n)            C[i, j] = Σ_k A[i, k] B[j, k]                   i < m, j < n
    outer_tile(m, vectors)    C[i, j] += scale Σ_k A[i, k] B[k, j]            i < m, j < 8 vectors

Batches of local training are small, and packing matrices for a library's product takes as long as the product: these
tiles read them where they are. What a number of the result is summed from, and in which order, depends neither on the
tile it falls into nor on how wide the processor's vectors are. Arguments are addresses and distances between rows,
counted in numbers (float32).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8  # of a vector; two SSE or NEON registers, one of AVX, half of one of AVX-512

_F32, _I64, _I32 = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR, _MASK = ir.VectorType(_F32, LANES), ir.VectorType(ir.IntType(1), LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)
_Builder = Any  # llvmlite has no types to check
_Value = Any


def dot_tile(m: int, n: int) -> Callable[..., None]:
    """Sums of lane l are over k = l, l + 8, ...; then lanes are added in pairs."""

    @intrinsic
    def tile(context: Any, a: Any, a_row: Any, b: Any, b_row: Any, k: Any, c: Any, c_row: Any) -> Any:
        def body(builder: _Builder, args: list[_Value]) -> None:
            emit = _Emitter(builder)
            a, a_row, b, b_row, k, c, c_row = args
            a_rows = [emit.row(emit.pointer(a), a_row, i) for i in range(m)]
            b_rows = [emit.row(emit.pointer(b), b_row, j) for j in range(n)]
            whole = builder.and_(k, _int(-LANES))

            def products(at: _Value, sums: list[_Value], mask: _Value | None) -> list[_Value]:
                lefts, changed = [emit.load(emit.at(row, at), mask) for row in a_rows], list(sums)
                for j, row in enumerate(b_rows):  # one at a time: m + m n + 1 vectors are in registers
                    right = emit.load(emit.at(row, at), mask)
                    for i, left in enumerate(lefts):
                        changed[i * n + j] = emit.multiply_add(left, right, sums[i * n + j])
                return changed

            sums = emit.loop(whole, LANES, [_ZERO] * (m * n), lambda at, now: products(at, now, None))
            rest = builder.sub(k, whole)
            sums = emit.loop(rest, LANES, sums, lambda _, now: products(whole, now, emit.first_lanes(rest)))
            place = emit.pointer(c)
            for i in range(m):
                row = emit.row(place, c_row, i)
                for j in range(n):
                    builder.store(emit.sum_of_lanes(sums[i * n + j]), emit.at(row, _int(j)))

        return types.void(*[types.intp] * 7), _calling(f"kinfed_dot_{m}_{n}", body)

    return tile


def outer_tile(m: int, vectors: int, masked: bool = False) -> Callable[..., None]:
    """A[i, k] lies at a + i * a_row + k * a_step; a `masked` tile of one vector has `width` columns only."""

    @intrinsic
    def tile(
        context: Any, c: Any, c_row: Any, a: Any, a_row: Any, a_step: Any, b: Any, b_row: Any, k: Any, scale: Any,
        width: Any,
    ) -> Any:  # fmt: skip
        def body(builder: _Builder, args: list[_Value]) -> None:
            emit = _Emitter(builder)
            c, c_row, a, a_row, a_step, b, b_row, k, scale, width = args
            mask = emit.first_lanes(width) if masked else None
            left, right, target = emit.pointer(a), emit.pointer(b), emit.pointer(c)

            def products(at: _Value, sums: list[_Value]) -> list[_Value]:
                row, column = emit.at(right, builder.mul(at, b_row)), emit.at(left, builder.mul(at, a_step))
                rights = [emit.load(emit.at(row, _int(LANES * v)), mask) for v in range(vectors)]
                changed = []
                for i in range(m):  # one at a time: m vectors + vectors + 1 are in registers
                    factor = emit.broadcast(builder.load(emit.row(column, a_row, i)))
                    changed += [emit.multiply_add(factor, rights[v], sums[i * vectors + v]) for v in range(vectors)]
                return changed

            sums = emit.loop(k, 1, [_ZERO] * (m * vectors), products)
            amount = emit.broadcast(scale)
            for i in range(m):
                for v in range(vectors):
                    place = emit.at(emit.row(target, c_row, i), _int(LANES * v))
                    emit.store(emit.multiply_add(amount, sums[i * vectors + v], emit.load(place, mask)), place, mask)

        name = f"kinfed_outer_{m}_{vectors}{'_masked' * masked}"
        return types.void(*[types.intp] * 8, types.float32, types.intp), _calling(name, body)

    return tile


@intrinsic
def pointer_to_floats(context: Any, address: Any) -> Any:
    """The address as a pointer to float32, of which numba.carray makes an array."""

    def generate(context: Any, builder: _Builder, signature: Any, args: list[_Value]) -> _Value:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.intp), generate


@intrinsic
def pointer_to_bytes(context: Any, address: Any) -> Any:
    """The address as a pointer to uint8."""

    def generate(context: Any, builder: _Builder, signature: Any, args: list[_Value]) -> _Value:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint8)(types.intp), generate


def _calling(name: str, body: Callable[[_Builder, list[_Value]], None]) -> Callable[..., _Value]:
    """The code of an intrinsic that calls a function of this name, with this body. A function, and never part of its
    callers: compiling the same tile at every place that needs it took three times as long in all."""

    def generate(context: Any, builder: _Builder, signature: Any, args: list[_Value]) -> _Value:
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in args])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        if not function.blocks:
            function.linkage = "linkonce_odr"
            function.attributes.add("noinline")
            function.attributes.add("nounwind")
            inside = ir.IRBuilder(function.append_basic_block("entry"))
            body(inside, list(function.args))
            inside.ret_void()
        builder.call(function, args)
        return context.get_dummy_value()

    return generate


class _Emitter:
    """Instructions on vectors. Loads and stores take any alignment; with a mask they touch its lanes alone."""

    def __init__(self, builder: _Builder) -> None:
        self._b = builder

    def pointer(self, address: _Value) -> _Value:
        return self._b.inttoptr(address, _F32.as_pointer())

    def at(self, pointer: _Value, numbers: _Value) -> _Value:
        return self._b.gep(pointer, [numbers])

    def row(self, pointer: _Value, distance: _Value, number: int) -> _Value:
        return self.at(pointer, self._b.mul(distance, _int(number)))

    def load(self, pointer: _Value, mask: _Value | None) -> _Value:
        vector = self._b.bitcast(pointer, _VECTOR.as_pointer())
        if mask is None:
            return self._b.load(vector, align=4)
        kind = ir.FunctionType(_VECTOR, [vector.type, _I32, _MASK, _VECTOR])
        return self._call("llvm.masked.load.v8f32.p0", kind, [vector, ir.Constant(_I32, 4), mask, _ZERO])

    def store(self, value: _Value, pointer: _Value, mask: _Value | None) -> None:
        vector = self._b.bitcast(pointer, _VECTOR.as_pointer())
        if mask is None:
            self._b.store(value, vector, align=4)
            return
        kind = ir.FunctionType(ir.VoidType(), [_VECTOR, vector.type, _I32, _MASK])
        self._call("llvm.masked.store.v8f32.p0", kind, [value, vector, ir.Constant(_I32, 4), mask])

    def multiply_add(self, x: _Value, y: _Value, z: _Value) -> _Value:
        return self._call("llvm.fmuladd.v8f32", ir.FunctionType(_VECTOR, [_VECTOR] * 3), [x, y, z])

    def broadcast(self, value: _Value) -> _Value:
        kind = ir.VectorType(value.type, LANES)
        first = self._b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_I32, 0))
        return self._b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), _lanes([0] * LANES))

    def first_lanes(self, count: _Value) -> _Value:
        """A mask of lanes 0 to count - 1."""
        numbers = ir.Constant(ir.VectorType(_I64, LANES), list(range(LANES)))
        return self._b.icmp_signed("<", numbers, self.broadcast(count))

    def sum_of_lanes(self, value: _Value) -> _Value:
        for distance in (4, 2, 1):
            other = _lanes([(lane + distance) % LANES for lane in range(LANES)])
            value = self._b.fadd(value, self._b.shuffle_vector(value, ir.Constant(_VECTOR, ir.Undefined), other))
        return self._b.extract_element(value, ir.Constant(_I32, 0))

    def loop(
        self, stop: _Value, step: int, start: list[_Value], body: Callable[[_Value, list[_Value]], list[_Value]]
    ) -> list[_Value]:
        """for at in range(0, stop, step): values = body(at, values)."""
        b = self._b
        before, inside, after = b.block, b.append_basic_block("loop"), b.append_basic_block("after")
        b.cbranch(b.icmp_signed(">", stop, _int(0)), inside, after)
        b.position_at_end(inside)
        at = b.phi(_I64)
        values = [b.phi(_VECTOR) for _ in start]
        changed = body(at, values)
        following, end = b.add(at, _int(step)), b.block
        for phi, first, later in zip([at, *values], [_int(0), *start], [following, *changed], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, end)
        b.cbranch(b.icmp_signed("<", following, stop), inside, after)
        b.position_at_end(after)
        results = [b.phi(_VECTOR) for _ in start]
        for phi, first, later in zip(results, start, changed, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, end)
        return results

    def _call(self, name: str, kind: Any, args: list[_Value]) -> _Value:
        return self._b.call(cgutils.get_or_insert_function(self._b.module, kind, name), args)


def _int(value: int) -> _Value:
    return ir.Constant(_I64, value)


def _lanes(numbers: list[int]) -> _Value:
    return ir.Constant(ir.VectorType(_I32, LANES), numbers)
