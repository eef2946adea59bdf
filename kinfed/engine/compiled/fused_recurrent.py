"""A step of one client's LSTM network, compiled: forward, and backward through time.

Time is the outermost axis, [T, B, ...]: the inputs of the gates of all steps are one product, and so are the gradients;
the loop over time is left with one product, and with gates. Weights that are used at every time are put into panels
once (kinfed.engine.compiled.products). A network is Unrolled, with one row of its table for each LSTM layer and one for
the head. Nothing here allocates memory, and no sum depends on other clients.
"""

import numpy as np

from kinfed.engine.compiled.fused_steps import ABSENT, BIAS, INPUTS, OUTPUTS, PLACE, WEIGHT, compiled, floats, shift
from kinfed.engine.compiled.products import add_panel_products, add_products, pack, products_of_rows, turn
from kinfed.engine.compiled.vector_functions import add_to_rows, backward_cell, forward_cell

# Columns of the table beside those of kinfed.engine.compiled.fused_steps, whose OUTPUTS are the units H of a layer:
# PLACE is in numbers per example of the batch.
AGAIN_WEIGHT, AGAIN_BIAS = 4, 6  # of what a layer's own last output goes through; ACTIVATION is no column here


@compiled
def _places(hidden, place, length, units, batch):
    """Addresses of h, c [T + 1, B, H], gates [T, B, 4 H] and tanh c [T, B, H] of a layer."""
    h = hidden + 4 * batch * place
    c = h + 4 * (length + 1) * batch * units
    gates = c + 4 * (length + 1) * batch * units
    return h, c, gates, gates + 16 * length * batch * units


def recurrent_forward(network, row, x, work, batch):
    """Compute what fused_steps.dense_forward does, for x [T, B, D]."""
    table, length, hidden = network.layers.table, network.layers.length, work.hidden
    below, panels, one = x, work.spare, np.int64(1)
    for layer in range(len(table) - 1):
        inputs, units = table[layer, INPUTS], table[layer, OUTPUTS]
        h, c, gates, tanh = _places(hidden, table[layer, PLACE], length, units, batch)
        bias = floats(row + 4 * table[layer, BIAS], 4 * units)
        more = floats(row + 4 * table[layer, AGAIN_BIAS], 4 * units)
        z = floats(gates, 4 * length * batch * units)
        for i in range(length * batch):
            for o in range(4 * units):
                z[i * 4 * units + o] = bias[o] + more[o]
        pack(inputs, 4 * units, row + 4 * table[layer, WEIGHT], inputs, one, panels)
        add_panel_products(length * batch, 4 * units, inputs, 1.0, below, inputs, panels, gates, 4 * units)
        pack(units, 4 * units, row + 4 * table[layer, AGAIN_WEIGHT], units, one, panels)
        floats(h, batch * units)[:] = np.float32(0.0)
        floats(c, batch * units)[:] = np.float32(0.0)
        step = 4 * batch * units  # bytes of [B, H]
        for t in range(length):
            if t > 0:
                add_panel_products(batch, 4 * units, units, 1.0, h + t * step, units, panels, gates + 4 * t * step,
                                   4 * units)  # fmt: skip
            for b in range(batch):
                at = t * step + 4 * b * units
                forward_cell(gates + 4 * at, c + at, c + step + at, tanh + at, h + step + at, units)
        below = h + step
    return _head_forward(table, row, below + 4 * (length - 1) * batch * table[len(table) - 1, INPUTS], hidden, batch)


@compiled
def _head_forward(table, row, features, hidden, batch):
    head = len(table) - 1
    inputs, classes, bias = table[head, INPUTS], table[head, OUTPUTS], table[head, BIAS]
    logits = hidden + 4 * batch * table[head, PLACE]
    products_of_rows(batch, classes, inputs, features, inputs, row + 4 * table[head, WEIGHT], inputs, logits, classes)
    if bias != ABSENT:
        add_to_rows(logits, batch, classes, row + 4 * bias)
    return logits


@compiled
def _add_sums(delta, rows, outputs, scale, target):
    """Add scale times the sums over rows of delta [rows, outputs] to the target [outputs]."""
    d, out, factor = floats(delta, rows * outputs), floats(target, outputs), np.float32(scale)
    for r in range(rows):
        for o in range(outputs):
            out[o] += factor * d[r * outputs + o]


@compiled
def _through_time(length, units, batch, gates, tanh, c, again, at_h, through_c, panels):
    """gates [T, B, 4 H] become the delta at what entered them, from the delta [T, B, H] at the layer's outputs, to
    which each time step adds what it passes on to the one before."""
    pack(4 * units, units, again, np.int64(1), units, panels)
    floats(through_c, batch * units)[:] = np.float32(0.0)
    step = 4 * batch * units
    for t in range(length - 1, -1, -1):
        if t < length - 1:
            add_panel_products(batch, units, 4 * units, 1.0, gates + 4 * (t + 1) * step, 4 * units, panels,
                               at_h + t * step, units)  # fmt: skip
        for b in range(batch):
            at = t * step + 4 * b * units
            backward_cell(gates + 4 * at, tanh + at, c + at, at_h + at, through_c + 4 * b * units, units)


@compiled
def _add_outer(rows, outputs, inputs, scale, turned, values, panels, target):
    """Add scale * Σ over rows of delta' value to a weight [outputs, inputs], for deltas turned [outputs, rows]."""
    pack(rows, inputs, values, np.int64(1), inputs, panels)
    add_panel_products(outputs, inputs, rows, scale, turned[0], turned[1], panels, target, inputs)


def recurrent_backward(network, row, target, scale, x, work, batch, terms):
    """Backward pass, as fused_steps.dense_backward; `network.trains` is [layers + 1, 4]: of weights and biases, then of
    those applied to a layer's own last output."""
    table, length, trains = network.layers.table, network.layers.length, network.trains
    hidden, delta, spare = work.hidden, work.delta, work.spare
    head, rows = len(table) - 1, length * batch
    inputs, classes = table[head, INPUTS], table[head, OUTPUTS]
    lowest = 0
    while lowest < head and trains[lowest, 0] + trains[lowest, 1] + trains[lowest, 2] + trains[lowest, 3] == 0:
        lowest += 1
    widest = np.int64(0)
    for layer in range(head):
        widest = max(widest, table[layer, OUTPUTS])
    through_c = spare  # [B, H]
    at_h = through_c + 4 * batch * widest  # [T, B, H]
    turned = at_h + 4 * rows * widest  # [4 H, T B]
    panels = turned + 16 * rows * widest
    top_h = _places(hidden, table[head - 1, PLACE], length, inputs, batch)[0]
    if lowest < head:
        last = (length - 1) * batch * inputs
        floats(at_h, rows * inputs)[:] = np.float32(0.0)
        add_products(batch, inputs, classes, 1.0, delta, classes, np.int64(1), row + 4 * table[head, WEIGHT], inputs,
                     at_h + 4 * last, inputs)  # fmt: skip
    features = top_h + 4 * length * batch * inputs
    if trains[head, 0]:
        begin = table[head, WEIGHT]
        shift(row, target, begin, inputs * classes, terms)
        add_products(classes, inputs, batch, scale, delta, np.int64(1), classes, features, inputs,
                     target + 4 * begin, inputs)  # fmt: skip
    if table[head, BIAS] != ABSENT and trains[head, 1]:
        shift(row, target, table[head, BIAS], classes, terms)
        _add_sums(delta, batch, classes, scale, target + 4 * table[head, BIAS])
    for layer in range(head - 1, lowest - 1, -1):
        inputs, units = table[layer, INPUTS], table[layer, OUTPUTS]
        h, c, gates, tanh = _places(hidden, table[layer, PLACE], length, units, batch)
        weight, again = table[layer, WEIGHT], table[layer, AGAIN_WEIGHT]
        _through_time(length, units, batch, gates, tanh, c, row + 4 * again, at_h, through_c, panels)
        values = x
        if layer > 0:
            values = _places(hidden, table[layer - 1, PLACE], length, inputs, batch)[0] + 4 * batch * inputs
        if layer > lowest:
            floats(at_h, rows * inputs)[:] = np.float32(0.0)
            pack(4 * units, inputs, row + 4 * weight, np.int64(1), inputs, panels)
            add_panel_products(rows, inputs, 4 * units, 1.0, gates, 4 * units, panels, at_h, inputs)
        turn(rows, 4 * units, gates, 4 * units, turned, rows)
        if trains[layer, 0]:
            shift(row, target, weight, 4 * units * inputs, terms)
            _add_outer(rows, 4 * units, inputs, scale, (turned, rows), values, panels, target + 4 * weight)
        if trains[layer, 2]:  # at the first time step there was no output before
            shift(row, target, again, 4 * units * units, terms)
            _add_outer(rows - batch, 4 * units, units, scale, (turned + 4 * batch, rows), h + 4 * batch * units,
                       panels, target + 4 * again)  # fmt: skip
        for column, place in ((1, BIAS), (3, AGAIN_BIAS)):
            if trains[layer, column]:
                shift(row, target, table[layer, place], 4 * units, terms)
                _add_sums(gates, rows, 4 * units, scale, target + 4 * table[layer, place])
