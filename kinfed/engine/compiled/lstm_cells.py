"""The gates of an LSTM layer at one example and time step, there and back, in vectors
(kinfed.engine.compiled.vector_code).

    i, f, o = σ(z_i), σ(z_f), σ(z_o)   g = tanh(z_g)   c' = f c + i g   h' = o tanh(c')

Arguments are addresses of float32; `units` is H. Sums of products are elsewhere (kinfed.engine.compiled.products).
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from kinfed.engine.compiled.vector_code import Builder, Emitter, Value, calling, whole_number
from kinfed.engine.compiled.vector_functions import constant, over_vectors, sigmoid, tanh


@intrinsic
def forward_cell(context: Any, gates: Any, c: Any, c_next: Any, tanh_c: Any, h: Any, units: Any) -> Any:
    """gates [4, H] of z <- i, f, g, o; c_next, tanh_c and h [H] of them and of c [H]."""

    def body(builder: Builder, args: list[Value]) -> None:
        gates, c, c_next, tanh_c, h, units = args
        emit = Emitter(builder)

        def piece(at: Value, _: list[Value], mask: Value | None) -> list[Value]:
            values = []
            for gate in range(4):
                place = builder.add(builder.mul(units, whole_number(gate)), at)
                z = emit.load(emit.at(emit.pointer(gates), place), mask)
                values.append(tanh(emit, builder, z) if gate == 2 else sigmoid(emit, builder, z))
                emit.store(values[-1], emit.at(emit.pointer(gates), place), mask)
            i, f, g, o = values
            before = emit.load(emit.at(emit.pointer(c), at), mask)
            after = builder.fadd(builder.fmul(f, before), builder.fmul(i, g))
            squashed = tanh(emit, builder, after)
            for value, target in ((after, c_next), (squashed, tanh_c), (builder.fmul(o, squashed), h)):
                emit.store(value, emit.at(emit.pointer(target), at), mask)
            return []

        over_vectors(emit, builder, units, [], piece)

    return types.void(*[types.intp] * 6), calling("kinfed_lstm_forward_cell", body)


@intrinsic
def backward_cell(context: Any, gates: Any, tanh_c: Any, c: Any, at_h: Any, through_c: Any, units: Any) -> Any:
    """gates [4, H] <- delta at z, from the deltas [H] at h and, in `through_c`, at c', which becomes that at c."""

    def body(builder: Builder, args: list[Value]) -> None:
        gates, tanh_c, c, at_h, through_c, units = args
        emit, multiply = Emitter(builder), builder.fmul
        one = constant(1.0)

        def piece(at: Value, _: list[Value], mask: Value | None) -> list[Value]:
            def number(address: Value) -> Value:
                return emit.load(emit.at(emit.pointer(address), at), mask)

            places = [
                emit.at(emit.pointer(gates), builder.add(builder.mul(units, whole_number(gate)), at))
                for gate in range(4)
            ]
            i, f, g, o = (emit.load(place, mask) for place in places)
            squashed, before = number(tanh_c), number(c)
            dh = number(at_h)
            dc = builder.fadd(
                number(through_c), multiply(dh, multiply(o, builder.fsub(one, multiply(squashed, squashed))))
            )  # ∂h/∂c' = o (1 − tanh² c')

            def slope(gate: Value) -> Value:
                return multiply(gate, builder.fsub(one, gate))  # σ' = σ (1 − σ)

            deltas = (
                multiply(multiply(dc, g), slope(i)),
                multiply(multiply(dc, before), slope(f)),
                multiply(multiply(dc, i), builder.fsub(one, multiply(g, g))),
                multiply(multiply(dh, squashed), slope(o)),
            )
            for value, place in zip(deltas, places, strict=True):
                emit.store(value, place, mask)
            emit.store(multiply(dc, f), emit.at(emit.pointer(through_c), at), mask)
            return []

        over_vectors(emit, builder, units, [], piece)

    return types.void(*[types.intp] * 6), calling("kinfed_lstm_backward_cell", body)
