"""Code of vectors of eight or sixteen numbers in LLVM's own language, for compiled loops whose speed must not depend on
what a compiler makes of them. What is summed, and in which order, does not depend on how wide the processor's vectors
are.
"""

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8  # of a vector; two SSE or NEON registers, one of AVX, half of one of AVX-512

_F32, _I64, _I32 = ir.FloatType(), ir.IntType(64), ir.IntType(32)
VECTOR = ir.VectorType(_F32, LANES)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)
_DISTANCES = (4, 2, 1)  # a value that is joined with itself, turned by each of these, has joined all lanes
Builder = Any  # llvmlite has no types to check
Value = Any
Piece = Callable[[Value, list[Value], Value | None], list[Value]]  # of vectors: (at, values, mask) to values


def _pointer_to(kind: Any) -> Callable[..., Any]:
    """A pointer to numbers of that kind at an address, of which numba.carray makes an array."""

    @intrinsic
    def pointer(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Builder, signature: Any, args: list[Value]) -> Value:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.intp), generate

    return pointer


floats_at, bytes_at = _pointer_to(types.float32), _pointer_to(types.uint8)
ints_at, longs_at = _pointer_to(types.int32), _pointer_to(types.int64)


@intrinsic
def prefetch(context: Any, address: Any) -> Any:
    """Ask for the memory at an address, which will be read soon."""

    def generate(context: Any, builder: Builder, signature: Any, args: list[Value]) -> Value:
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        read, keep_in_all_caches, data = (ir.Constant(_I32, number) for number in (0, 3, 1))
        builder.call(function, [pointer, read, keep_in_all_caches, data])
        return context.get_dummy_value()

    return types.void(types.intp), generate


def emitted(name: str, real: str = "", lanes: int = LANES) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that makes a compiled function of this name from `body(emit, builder, *arguments)`, which writes its
    code. Arguments are whole numbers, but for that called `real`, a float32. It is never part of its callers: compiling
    a tile at every place that needs it took three times as long in all. Its vectors have `lanes` numbers."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        arguments = list(signature(body).parameters.values())[2:]
        kinds = [types.float32 if one.name == real else types.intp for one in arguments]

        def declare(context: Any, *_: Any) -> Any:
            return types.void(*kinds), _calling(f"kinfed_{name}", body, lanes)

        context = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD)
        declare.__signature__ = Signature([context, *arguments])  # type: ignore[attr-defined]  # which numba reads
        function: Callable[..., None] = intrinsic(declare)
        return function

    return decorate


def _calling(name: str, body: Callable[..., None], lanes: int) -> Callable[..., Value]:
    def generate(context: Any, builder: Builder, signature: Any, args: list[Value]) -> Value:
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in args])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        if not function.blocks:
            function.linkage = "linkonce_odr"
            function.attributes.add("noinline")
            function.attributes.add("nounwind")
            inside = ir.IRBuilder(function.append_basic_block("entry"))
            body(Emitter(inside, lanes), inside, *function.args)
            inside.ret_void()
        builder.call(function, args)
        return context.get_dummy_value()

    return generate


class Emitter:
    """Instructions on vectors. Loads and stores take any alignment; with a mask they touch its lanes alone."""

    def __init__(self, builder: Builder, lanes: int = LANES) -> None:
        self._b, self._lanes, self._vector = builder, lanes, ir.VectorType(_F32, lanes)

    @property
    def zero(self) -> Value:
        return ir.Constant(self._vector, [0.0] * self._lanes)

    def pointer(self, address: Value) -> Value:
        return self._b.inttoptr(address, _F32.as_pointer())

    def at(self, pointer: Value, numbers: Value) -> Value:
        return self._b.gep(pointer, [numbers])

    def row(self, pointer: Value, distance: Value, number: int) -> Value:
        return self.at(pointer, self._b.mul(distance, whole_number(number)))

    def load(self, pointer: Value, mask: Value | None) -> Value:
        vector = self._b.bitcast(pointer, self._vector.as_pointer())
        if mask is None:
            return self._b.load(vector, align=4)
        kind = ir.FunctionType(self._vector, [vector.type, _I32, mask.type, self._vector])
        return self._call(
            f"llvm.masked.load.v{self._lanes}f32.p0", kind, [vector, ir.Constant(_I32, 4), mask, self.zero]
        )

    def store(self, value: Value, pointer: Value, mask: Value | None) -> None:
        vector = self._b.bitcast(pointer, self._vector.as_pointer())
        if mask is None:
            self._b.store(value, vector, align=4)
            return
        kind = ir.FunctionType(ir.VoidType(), [self._vector, vector.type, _I32, mask.type])
        self._call(f"llvm.masked.store.v{self._lanes}f32.p0", kind, [value, vector, ir.Constant(_I32, 4), mask])

    def multiply_add(self, x: Value, y: Value, z: Value) -> Value:
        kind = ir.FunctionType(self._vector, [self._vector] * 3)
        return self._call(f"llvm.fmuladd.v{self._lanes}f32", kind, [x, y, z])

    def floor(self, x: Value) -> Value:
        return self._call("llvm.floor.v8f32", ir.FunctionType(VECTOR, [VECTOR]), [x])

    def whole_numbers(self, x: Value) -> Value:
        """int32 of numbers that are whole; of NaN, 0."""
        kind = ir.FunctionType(ir.VectorType(_I32, LANES), [VECTOR])
        return self._call("llvm.fptosi.sat.v8i32.v8f32", kind, [x])

    def broadcast(self, value: Value) -> Value:
        kind = ir.VectorType(value.type, self._lanes)
        first = self._b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_I32, 0))
        return self._b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), _lanes([0] * self._lanes))

    def mixed(self, one: Value, other: Value, lanes: list[int]) -> Value:
        """Lanes of two vectors: numbers from LANES on are those of the other one."""
        return self._b.shuffle_vector(one, other, _lanes(lanes))

    def first_lanes(self, count: Value) -> Value:
        """A mask of lanes 0 to count - 1."""
        numbers = ir.Constant(ir.VectorType(_I64, self._lanes), list(range(self._lanes)))
        return self._b.icmp_signed("<", numbers, self.broadcast(count))

    def sum_of_lanes(self, value: Value) -> Value:
        for distance in _DISTANCES:
            value = self._b.fadd(value, self._turned(value, distance))
        return self._b.extract_element(value, ir.Constant(_I32, 0))

    def largest_lane(self, value: Value) -> Value:
        """The largest number, in every lane; NaN is passed over where a number is beside it."""
        for distance in _DISTANCES:
            value = self.larger(self._turned(value, distance), value)
        return value

    def larger(self, x: Value, y: Value) -> Value:
        """y where x is NaN."""
        return self._b.select(self._b.fcmp_ordered(">", x, y), x, y)

    def _turned(self, value: Value, distance: int) -> Value:
        """The value of the lane that lies `distance` further, past the last one from the first on, in each lane."""
        lanes = _lanes([(lane + distance) % LANES for lane in range(LANES)])
        return self._b.shuffle_vector(value, ir.Constant(VECTOR, ir.Undefined), lanes)

    def loop(
        self, stop: Value, step: int, start: list[Value], body: Callable[[Value, list[Value]], list[Value]]
    ) -> list[Value]:
        """for at in range(0, stop, step): values = body(at, values)."""
        b = self._b
        before, inside, after = b.block, b.append_basic_block("loop"), b.append_basic_block("after")
        b.cbranch(b.icmp_signed(">", stop, whole_number(0)), inside, after)
        b.position_at_end(inside)
        at = b.phi(_I64)
        values = [b.phi(self._vector) for _ in start]
        changed = body(at, values)
        following, end = b.add(at, whole_number(step)), b.block
        for phi, first, later in zip([at, *values], [whole_number(0), *start], [following, *changed], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, end)
        b.cbranch(b.icmp_signed("<", following, stop), inside, after)
        b.position_at_end(after)
        results = [b.phi(self._vector) for _ in start]
        for phi, first, later in zip(results, start, changed, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, end)
        return results

    def over(self, count: Value, start: list[Value], piece: Piece) -> list[Value]:
        """`values = piece(at, values, mask)` for all of `count` numbers: whole vectors, then the rest."""
        whole = self._b.and_(count, whole_number(-LANES))
        values = self.loop(whole, LANES, start, lambda at, now: piece(at, now, None))
        rest = self._b.sub(count, whole)
        return self.loop(rest, LANES, values, lambda _, now: piece(whole, now, self.first_lanes(rest)))

    def _call(self, name: str, kind: Any, args: list[Value]) -> Value:
        return self._b.call(cgutils.get_or_insert_function(self._b.module, kind, name), args)


def whole_number(value: int) -> Value:
    return ir.Constant(_I64, value)


def _lanes(numbers: list[int]) -> Value:
    return ir.Constant(ir.VectorType(_I32, len(numbers)), numbers)
