"""tanh, σ and exp of vectors of eight numbers (kinfed.engine.vector_code), for compiled loops. A library's take one
number at a time, and their last bits depend on the library.

    tanh_of(x, count)    x <- tanh(x)    of so many numbers (float32) at an address
    exp_of(x, count)     x <- exp(x)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kinfed.engine.vector_code import LANES, VECTOR, Builder, Emitter, Value, calling, whole_number

# tanh(x) = x P(x²) / Q(x²), fitted to the least largest relative error (2e-8) up to TANH_ENDS, where tanh is 1 to the
# last bit but one; rounding to float32 makes that 4e-7.
TANH_ENDS = 9.0
TANH_P = (0.9999999796284391, 0.13380981115324872, 0.003495534492854174, 2.0608184064274022e-05, 1.3353412139548512e-08)
TANH_Q = (1.0, 0.4671429677369428, 0.02587677992358743, 0.0003285546251904836, 7.776046756426064e-07)

# exp(r) = 1 + r + r² P(r) up to |r| = ln 2 / 2, fitted to the least largest relative error (3e-9).
EXP_P = (0.4999999403953552, 0.1666652113199234, 0.04166838899254799, 0.008368716575205326, 0.001381459878757596)
EXP_ENDS = (-87.0, 88.0)  # exp of less is taken for 0, of more for exp of this; float32 ends a little further out
PER_LN_2 = 1.4426950408889634
LN_2_PARTS = (0.693359375, -0.00021219444005469057)  # the first has so few bits that its multiples are exact

_I32 = ir.VectorType(ir.IntType(32), LANES)
_EXPONENT_BIAS, _FRACTION_BITS = 127, 23  # of float32


def constant(value: float) -> Value:
    return ir.Constant(VECTOR, [value] * LANES)


def polynomial(emit: Emitter, x: Value, coefficients: tuple[float, ...]) -> Value:
    """Horner's rule; the constant comes first."""
    total = constant(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = emit.multiply_add(total, x, constant(coefficient))
    return total


def tanh(emit: Emitter, builder: Builder, x: Value) -> Value:
    """NaN stays NaN."""
    x = _between(builder, x, -TANH_ENDS, TANH_ENDS)
    square = builder.fmul(x, x)
    above, below = polynomial(emit, square, TANH_P), polynomial(emit, square, TANH_Q)
    return builder.fdiv(builder.fmul(x, above), below)


def sigmoid(emit: Emitter, builder: Builder, x: Value) -> Value:
    """σ(x) = (1 + tanh(x / 2)) / 2."""
    half = constant(0.5)
    return emit.multiply_add(half, tanh(emit, builder, builder.fmul(x, half)), half)


def exp(emit: Emitter, builder: Builder, x: Value) -> Value:
    """2ⁿ exp(r) with x = n ln 2 + r. NaN stays NaN."""
    inside = _between(builder, x, *EXP_ENDS)
    n = emit.floor(emit.multiply_add(inside, constant(PER_LN_2), constant(0.5)))
    r = inside
    for part in LN_2_PARTS:
        r = emit.multiply_add(n, constant(-part), r)
    small = emit.multiply_add(builder.fmul(r, r), polynomial(emit, r, EXP_P), builder.fadd(r, constant(1.0)))
    exponent = builder.add(emit.whole_numbers(n), ir.Constant(_I32, [_EXPONENT_BIAS] * LANES))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(_I32, [_FRACTION_BITS] * LANES)), VECTOR)
    too_small = builder.fcmp_ordered("<", x, constant(EXP_ENDS[0]))
    return builder.select(too_small, constant(0.0), builder.fmul(small, power))


def over_vectors(emit: Emitter, builder: Builder, count: Value, piece: Callable[[Value, Value | None], None]) -> None:
    """`piece(at, mask)` for all of so many numbers: whole vectors, then what is left."""

    def run(at: Value, mask: Value | None) -> list[Value]:
        piece(at, mask)
        return []

    whole = builder.and_(count, whole_number(-LANES))
    emit.loop(whole, LANES, [], lambda at, _: run(at, None))
    rest = builder.sub(count, whole)
    emit.loop(rest, LANES, [], lambda _, __: run(whole, emit.first_lanes(rest)))


def _between(builder: Builder, x: Value, least: float, most: float) -> Value:
    for end, sign in ((most, ">"), (least, "<")):
        x = builder.select(builder.fcmp_ordered(sign, x, constant(end)), constant(end), x)
    return x


def _in_place(name: str, function: Callable[[Emitter, Builder, Value], Value]) -> Callable[..., None]:
    @intrinsic
    def apply(context: Any, x: Any, count: Any) -> Any:
        def body(builder: Builder, args: list[Value]) -> None:
            emit, (address, count) = Emitter(builder), args

            def piece(at: Value, mask: Value | None) -> None:
                place = emit.at(emit.pointer(address), at)
                emit.store(function(emit, builder, emit.load(place, mask)), place, mask)

            over_vectors(emit, builder, count, piece)

        return types.void(types.intp, types.intp), calling(f"kinfed_{name}_of", body)

    return apply


tanh_of, exp_of = _in_place("tanh", tanh), _in_place("exp", exp)
