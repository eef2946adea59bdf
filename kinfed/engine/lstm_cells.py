"""The gates of an LSTM layer at one example and time step, there and back, in vectors (kinfed.engine.vector_code).

    i, f, o = σ(z_i), σ(z_f), σ(z_o)   g = tanh(z_g)   c' = f c + i g   h' = o tanh(c')

Arguments are addresses of float32; `units` is H. Sums of products are elsewhere (kinfed.engine.products).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kinfed.engine.vector_code import LANES, VECTOR, Builder, Emitter, Value, calling, whole_number

# tanh(x) = x P(x²) / Q(x²), fitted to the least largest relative error (2e-8) up to TANH_ENDS, where tanh is 1 to the
# last bit but one; rounding to float32 makes that 4e-7. A library's tanh takes one number at a time.
TANH_ENDS = 9.0
TANH_P = (0.9999999796284391, 0.13380981115324872, 0.003495534492854174, 2.0608184064274022e-05, 1.3353412139548512e-08)
TANH_Q = (1.0, 0.4671429677369428, 0.02587677992358743, 0.0003285546251904836, 7.776046756426064e-07)


@intrinsic
def forward_cell(context: Any, gates: Any, c: Any, c_next: Any, tanh_c: Any, h: Any, units: Any) -> Any:
    """gates [4, H] of z <- i, f, g, o; c_next, tanh_c and h [H] of them and of c [H]."""

    def body(builder: Builder, args: list[Value]) -> None:
        gates, c, c_next, tanh_c, h, units = args
        emit = Emitter(builder)

        def piece(at: Value, mask: Value | None) -> None:
            values = []
            for gate in range(4):
                place = builder.add(builder.mul(units, whole_number(gate)), at)
                z = emit.load(emit.at(emit.pointer(gates), place), mask)
                values.append(_tanh(emit, builder, z) if gate == 2 else _sigmoid(emit, builder, z))
                emit.store(values[-1], emit.at(emit.pointer(gates), place), mask)
            i, f, g, o = values
            before = emit.load(emit.at(emit.pointer(c), at), mask)
            after = builder.fadd(builder.fmul(f, before), builder.fmul(i, g))
            tanh = _tanh(emit, builder, after)
            for value, target in ((after, c_next), (tanh, tanh_c), (builder.fmul(o, tanh), h)):
                emit.store(value, emit.at(emit.pointer(target), at), mask)

        _over_units(emit, builder, units, piece)

    return types.void(*[types.intp] * 6), calling("kinfed_lstm_forward_cell", body)


@intrinsic
def backward_cell(context: Any, gates: Any, tanh_c: Any, c: Any, at_h: Any, through_c: Any, units: Any) -> Any:
    """gates [4, H] <- delta at z, from the deltas [H] at h and, in `through_c`, at c', which becomes that at c."""

    def body(builder: Builder, args: list[Value]) -> None:
        gates, tanh_c, c, at_h, through_c, units = args
        emit, multiply = Emitter(builder), builder.fmul
        one = _constant(1.0)

        def piece(at: Value, mask: Value | None) -> None:
            def number(address: Value) -> Value:
                return emit.load(emit.at(emit.pointer(address), at), mask)

            places = [
                emit.at(emit.pointer(gates), builder.add(builder.mul(units, whole_number(gate)), at))
                for gate in range(4)
            ]
            i, f, g, o = (emit.load(place, mask) for place in places)
            tanh, before = number(tanh_c), number(c)
            dh = number(at_h)
            dc = builder.fadd(
                number(through_c), multiply(dh, multiply(o, builder.fsub(one, multiply(tanh, tanh))))
            )  # ∂h/∂c' = o (1 − tanh² c')

            def slope(gate: Value) -> Value:
                return multiply(gate, builder.fsub(one, gate))  # σ' = σ (1 − σ)

            deltas = (
                multiply(multiply(dc, g), slope(i)),
                multiply(multiply(dc, before), slope(f)),
                multiply(multiply(dc, i), builder.fsub(one, multiply(g, g))),
                multiply(multiply(dh, tanh), slope(o)),
            )
            for value, place in zip(deltas, places, strict=True):
                emit.store(value, place, mask)
            emit.store(multiply(dc, f), emit.at(emit.pointer(through_c), at), mask)

        _over_units(emit, builder, units, piece)

    return types.void(*[types.intp] * 6), calling("kinfed_lstm_backward_cell", body)


def _over_units(emit: Emitter, builder: Builder, units: Value, piece: Callable[[Value, Value | None], None]) -> None:
    """`piece(at, mask)` for all units: whole vectors, then what is left."""

    def run(at: Value, mask: Value | None) -> list[Value]:
        piece(at, mask)
        return []

    whole = builder.and_(units, whole_number(-LANES))
    emit.loop(whole, LANES, [], lambda at, _: run(at, None))
    rest = builder.sub(units, whole)
    emit.loop(rest, LANES, [], lambda _, __: run(whole, emit.first_lanes(rest)))


def _sigmoid(emit: Emitter, builder: Builder, x: Value) -> Value:
    """σ(x) = (1 + tanh(x / 2)) / 2."""
    half = _constant(0.5)
    return emit.multiply_add(half, _tanh(emit, builder, builder.fmul(x, half)), half)


def _tanh(emit: Emitter, builder: Builder, x: Value) -> Value:
    """NaN stays NaN."""
    for end, sign in ((TANH_ENDS, ">"), (-TANH_ENDS, "<")):
        x = builder.select(builder.fcmp_ordered(sign, x, _constant(end)), _constant(end), x)
    square = builder.fmul(x, x)
    above, below = _polynomial(emit, square, TANH_P), _polynomial(emit, square, TANH_Q)
    return builder.fdiv(builder.fmul(x, above), below)


def _polynomial(emit: Emitter, x: Value, coefficients: tuple[float, ...]) -> Value:
    """Horner's rule; the constant comes first."""
    total = _constant(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = emit.multiply_add(total, x, _constant(coefficient))
    return total


def _constant(value: float) -> Value:
    return ir.Constant(VECTOR, [value] * LANES)
