"""tanh, σ and exp of vectors of eight numbers (kinfed.engine.compiled.vector_code), for compiled loops. Library
functions take one number at a time, and their last bits depend on the library.

    tanh_of(x, count)                        x[i] = tanh(x[i])
    softmax_of(z, count, weight, p)          p[i] = weight exp(z[i]) / Σ_j exp(z[j])
    add_to_rows(x, rows, count, y)           x[r, i] += y[i]
    add_sum_of_rows(x, rows, count, by, y)   y[i] += by Σ_r x[r, i]
    forward_cell, backward_cell              gates of an LSTM layer at one example and time step, there and back:

        i, f, o = σ(z_i), σ(z_f), σ(z_o)   g = tanh(z_g)   c' = f c + i g   h' = o tanh(c')

Arguments are addresses of float32, rows lie one behind the other; `units` is H.
"""

from math import inf

from llvmlite import ir

from kinfed.engine.compiled.vector_code import LANES, VECTOR, ZERO, Builder, Emitter, Value, emitted, whole_number

# tanh(x) = x P(x²) / Q(x²), fitted to the least largest relative error (2e-8) up to TANH_ENDS, where tanh is 1 to the
# last bit but one; rounding to float32 makes that 4e-7.
TANH_ENDS = 9.0
TANH_P = (0.9999999796284391, 0.13380981115324872, 0.003495534492854174, 2.0608184064274022e-05, 1.3353412139548512e-08)
TANH_Q = (1.0, 0.4671429677369428, 0.02587677992358743, 0.0003285546251904836, 7.776046756426064e-07)

# exp(r) = 1 + r + r² P(r) up to |r| = ln 2 / 2, fitted to the least largest relative error (3e-9).
EXP_P = (0.4999999403953552, 0.1666652113199234, 0.04166838899254799, 0.008368716575205326, 0.001381459878757596)
# exp of less is taken for 0 (down to -104, float32 could tell it from 0), and of more for exp of this.
EXP_ENDS = (-87.0, 88.0)
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
    """A number from -1 to 1, which rounding would pass by a bit or two. NaN stays NaN."""
    x = _between(builder, x, -TANH_ENDS, TANH_ENDS)
    square = builder.fmul(x, x)
    above, below = polynomial(emit, square, TANH_P), polynomial(emit, square, TANH_Q)
    return _between(builder, builder.fdiv(builder.fmul(x, above), below), -1.0, 1.0)


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


def _between(builder: Builder, x: Value, least: float, most: float) -> Value:
    for end, sign in ((most, ">"), (least, "<")):
        x = builder.select(builder.fcmp_ordered(sign, x, constant(end)), constant(end), x)
    return x


@emitted("tanh_of")
def tanh_of(emit, builder, x, count):
    def piece(at: Value, _: list[Value], mask: Value | None) -> list[Value]:
        place = emit.at(emit.pointer(x), at)
        emit.store(tanh(emit, builder, emit.load(place, mask)), place, mask)
        return []

    emit.over(count, [], piece)


@emitted("softmax_of", real="weight")
def softmax_of(emit, builder, z, count, weight, p):
    """The softmax of z less the largest z, so that nothing overflows. No branch depends on a value: a processor cannot
    guess which logit is the largest. NaN anywhere makes all of it NaN."""
    z, p = emit.pointer(z), emit.pointer(p)
    lowest = constant(-inf)

    def larger(at: Value, now: list[Value], mask: Value | None) -> list[Value]:
        value = emit.load(emit.at(z, at), mask)
        return [emit.larger(value if mask is None else builder.select(mask, value, lowest), now[0])]

    def exps(at: Value, now: list[Value], mask: Value | None) -> list[Value]:
        value = exp(emit, builder, builder.fsub(emit.load(emit.at(z, at), mask), largest))
        emit.store(value, emit.at(p, at), mask)
        return [builder.fadd(now[0], value if mask is None else builder.select(mask, value, ZERO))]

    def shares(at: Value, _: list[Value], mask: Value | None) -> list[Value]:
        place = emit.at(p, at)
        emit.store(builder.fmul(emit.load(place, mask), share), place, mask)
        return []

    largest = emit.largest_lane(emit.over(count, [lowest], larger)[0])
    (total,) = emit.over(count, [ZERO], exps)
    share = emit.broadcast(builder.fdiv(weight, emit.sum_of_lanes(total)))
    emit.over(count, [], shares)


@emitted("add_to_rows")
def add_to_rows(emit, builder, x, rows, count, y):
    def piece(at: Value, _: list[Value], mask: Value | None) -> list[Value]:
        amount = emit.load(emit.at(emit.pointer(y), at), mask)

        def add(row: Value, _: list[Value]) -> list[Value]:
            place = emit.at(emit.pointer(x), builder.add(builder.mul(row, count), at))
            emit.store(builder.fadd(emit.load(place, mask), amount), place, mask)
            return []

        emit.loop(rows, 1, [], add)
        return []

    emit.over(count, [], piece)


@emitted("add_sum_of_rows", real="by")
def add_sum_of_rows(emit, builder, x, rows, count, by, y):
    factor = emit.broadcast(by)

    def piece(at: Value, _: list[Value], mask: Value | None) -> list[Value]:
        def add(row: Value, now: list[Value]) -> list[Value]:
            place = emit.at(emit.pointer(x), builder.add(builder.mul(row, count), at))
            return [builder.fadd(now[0], emit.load(place, mask))]

        (total,) = emit.loop(rows, 1, [ZERO], add)
        place = emit.at(emit.pointer(y), at)
        emit.store(emit.multiply_add(factor, total, emit.load(place, mask)), place, mask)
        return []

    emit.over(count, [], piece)


@emitted("lstm_forward_cell")
def forward_cell(emit, builder, gates, c, c_next, tanh_c, h, units):
    """gates [4, H] of z <- i, f, g, o; c_next, tanh_c and h [H] of them and of c [H]."""

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

    emit.over(units, [], piece)


@emitted("lstm_backward_cell")
def backward_cell(emit, builder, gates, tanh_c, c, at_h, through_c, units):
    """gates [4, H] <- delta at z, from the deltas [H] at h and, in `through_c`, at c', which becomes that at c."""
    multiply, one = builder.fmul, constant(1.0)

    def piece(at: Value, _: list[Value], mask: Value | None) -> list[Value]:
        def number(address: Value) -> Value:
            return emit.load(emit.at(emit.pointer(address), at), mask)

        places = [
            emit.at(emit.pointer(gates), builder.add(builder.mul(units, whole_number(gate)), at)) for gate in range(4)
        ]
        i, f, g, o = (emit.load(place, mask) for place in places)
        squashed, before = number(tanh_c), number(c)
        dh = number(at_h)
        h_by_c = multiply(o, builder.fsub(one, multiply(squashed, squashed)))  # ∂h/∂c' = o (1 − tanh² c')
        dc = builder.fadd(number(through_c), multiply(dh, h_by_c))

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

    emit.over(units, [], piece)
