"""A step of one client's LSTM network, compiled: forward, and backward through time.

Time is the outermost axis, [T, B, ...]: what enters the gates of all steps is one product, and so are the gradients;
the loop over time is left with one product, and with gates (kinfed.engine.lstm_cells). A network is (table, T), with
one row of the table for each LSTM layer and one for the head. Nothing here allocates memory, and no sum depends on
other clients.
"""

from __future__ import annotations

import numpy as np

from kinfed.engine.fused_steps import ABSENT, BIAS, INPUTS, OUTPUTS, PLACE, WEIGHT, compiled, floats, shift
from kinfed.engine.lstm_cells import backward_cell, forward_cell
from kinfed.engine.products import add_products, products_of_rows, turn

# Columns of the table beside those of kinfed.engine.fused_steps, whose OUTPUTS are the units H of a layer: PLACE is in
# numbers per example of the batch.
AGAIN_WEIGHT, AGAIN_BIAS = 4, 6  # of what a layer's own last output goes through; ACTIVATION is no column here


@compiled
def _places(hidden, place, length, units, batch):
    """Addresses of h, c [T + 1, B, H], gates [T, B, 4 H] and tanh c [T, B, H] of a layer."""
    h = hidden + 4 * batch * place
    c = h + 4 * (length + 1) * batch * units
    gates = c + 4 * (length + 1) * batch * units
    return h, c, gates, gates + 16 * length * batch * units


@compiled
def recurrent_forward(net, row, x, hidden, spare, batch):
    """As fused_steps.dense_forward, for x [T, B, D]."""
    table, length = net
    below = x
    for layer in range(len(table) - 1):
        inputs, units = table[layer, INPUTS], table[layer, OUTPUTS]
        h, c, gates, tanh = _places(hidden, table[layer, PLACE], length, units, batch)
        weight, again = row + 4 * table[layer, WEIGHT], row + 4 * table[layer, AGAIN_WEIGHT]
        bias, recurrent = spare, spare + 16 * units
        total, one = floats(bias, 4 * units), floats(row + 4 * table[layer, BIAS], 4 * units)
        other = floats(row + 4 * table[layer, AGAIN_BIAS], 4 * units)
        for i in range(4 * units):
            total[i] = one[i] + other[i]
        floats(h, batch * units)[:] = np.float32(0.0)
        floats(c, batch * units)[:] = np.float32(0.0)
        floats(recurrent, 4 * batch * units)[:] = np.float32(0.0)
        products_of_rows(length * batch, 4 * units, inputs, below, inputs, weight, inputs, gates, 4 * units)
        step = 4 * batch * units  # bytes of [B, H]
        for t in range(length):
            if t > 0:
                products_of_rows(batch, 4 * units, units, h + t * step, units, again, units, recurrent, 4 * units)
            for b in range(batch):
                at = t * step + 4 * b * units
                forward_cell(gates + 4 * at, recurrent + 16 * b * units, bias, c + at, c + step + at,
                             tanh + at, h + step + at, units)  # fmt: skip
        below = h + step
    return _head_forward(table, row, below + 4 * (length - 1) * batch * table[len(table) - 1, INPUTS], hidden, batch)


@compiled
def _head_forward(table, row, features, hidden, batch):
    head = len(table) - 1
    inputs, classes, bias = table[head, INPUTS], table[head, OUTPUTS], table[head, BIAS]
    logits = hidden + 4 * batch * table[head, PLACE]
    products_of_rows(batch, classes, inputs, features, inputs, row + 4 * table[head, WEIGHT], inputs, logits, classes)
    if bias != ABSENT:
        z, more = floats(logits, batch * classes), floats(row + 4 * bias, classes)
        for b in range(batch):
            for c in range(classes):
                z[b * classes + c] += more[c]
    return logits


@compiled
def _add_sums(delta, rows, outputs, scale, target):
    """Add scale times the sums over rows of delta [rows, outputs] to the target [outputs]."""
    d, out, factor = floats(delta, rows * outputs), floats(target, outputs), np.float32(scale)
    for r in range(rows):
        for o in range(outputs):
            out[o] += factor * d[r * outputs + o]


@compiled
def _through_time(length, units, batch, gates, tanh, c, again, from_above, from_later, through_c, turned):
    """gates [T, B, 4 H] become the delta at what entered them, from the delta [T, B, H] at the layer's outputs."""
    turn(4 * units, units, again, units, turned, 4 * units)
    floats(through_c, batch * units)[:] = np.float32(0.0)
    floats(from_later, batch * units)[:] = np.float32(0.0)
    step = 4 * batch * units
    for t in range(length - 1, -1, -1):
        if t < length - 1:
            products_of_rows(batch, units, 4 * units, gates + 4 * (t + 1) * step, 4 * units, turned, 4 * units,
                             from_later, units)  # fmt: skip
        for b in range(batch):
            inside = 4 * b * units
            at = t * step + inside
            backward_cell(gates + 4 * at, tanh + at, c + at, from_above + at, from_later + inside,
                          through_c + inside, units)  # fmt: skip


@compiled
def recurrent_backward(
    net, trains, row, target, scale, x, hidden, delta, spare, batch, rate, lam, center, drift, decay
):  # fmt: skip
    """As fused_steps.dense_backward; `trains` [layers + 1, 4]: of weights and biases, then of those applied to a
    layer's own last output."""
    table, length = net
    head, rows = len(table) - 1, length * batch
    inputs, classes = table[head, INPUTS], table[head, OUTPUTS]
    lowest = 0
    while lowest < head and trains[lowest, 0] + trains[lowest, 1] + trains[lowest, 2] + trains[lowest, 3] == 0:
        lowest += 1
    widest = np.int64(0)
    for layer in range(head):
        widest = max(widest, table[layer, OUTPUTS])
    from_later = spare
    through_c = from_later + 4 * batch * widest
    from_above = through_c + 4 * batch * widest
    turned = from_above + 4 * rows * widest  # [H, 4 H] of weights, or [4 H, T B] of deltas
    top_h = _places(hidden, table[head - 1, PLACE], length, inputs, batch)[0]
    if lowest < head:
        last = (length - 1) * batch * inputs
        floats(from_above, rows * inputs)[:] = np.float32(0.0)
        add_products(batch, inputs, classes, 1.0, delta, classes, np.int64(1), row + 4 * table[head, WEIGHT], inputs,
                     from_above + 4 * last, inputs)  # fmt: skip
    features = top_h + 4 * length * batch * inputs
    if trains[head, 0]:
        begin = table[head, WEIGHT]
        if target == row:
            shift(row, begin, inputs * classes, rate, lam, center, drift, decay)
        add_products(classes, inputs, batch, scale, delta, np.int64(1), classes, features, inputs,
                     target + 4 * begin, inputs)  # fmt: skip
    if table[head, BIAS] != ABSENT and trains[head, 1]:
        if target == row:
            shift(row, table[head, BIAS], classes, rate, lam, center, drift, decay)
        _add_sums(delta, batch, classes, scale, target + 4 * table[head, BIAS])
    for layer in range(head - 1, lowest - 1, -1):
        inputs, units = table[layer, INPUTS], table[layer, OUTPUTS]
        h, c, gates, tanh = _places(hidden, table[layer, PLACE], length, units, batch)
        weight, again = table[layer, WEIGHT], table[layer, AGAIN_WEIGHT]
        _through_time(length, units, batch, gates, tanh, c, row + 4 * again, from_above, from_later, through_c, turned)
        values = x
        if layer > 0:
            values = _places(hidden, table[layer - 1, PLACE], length, inputs, batch)[0] + 4 * batch * inputs
        if layer > lowest:
            turn(4 * units, inputs, row + 4 * weight, inputs, turned, 4 * units)
            products_of_rows(rows, inputs, 4 * units, gates, 4 * units, turned, 4 * units, from_above, inputs)
        turn(rows, 4 * units, gates, 4 * units, turned, rows)
        if trains[layer, 0]:
            if target == row:
                shift(row, weight, 4 * units * inputs, rate, lam, center, drift, decay)
            add_products(4 * units, inputs, rows, scale, turned, rows, np.int64(1), values, inputs,
                         target + 4 * weight, inputs)  # fmt: skip
        if trains[layer, 2]:
            if target == row:
                shift(row, again, 4 * units * units, rate, lam, center, drift, decay)
            add_products(4 * units, units, rows - batch, scale, turned + 4 * batch, rows, np.int64(1),
                         h + 4 * batch * units, units, target + 4 * again, units)  # fmt: skip
        for column, place in ((1, BIAS), (3, AGAIN_BIAS)):
            if trains[layer, column]:
                if target == row:
                    shift(row, table[layer, place], 4 * units, rate, lam, center, drift, decay)
                _add_sums(gates, rows, 4 * units, scale, target + 4 * table[layer, place])
