"""A step of one client, compiled: forward, delta of the loss, backward, the optimizer, and random orders of examples.

A network is a table `net` with one row per dense layer and these columns; rows of models, examples and work memory are
addresses of float32. Nothing here allocates memory, and no sum depends on other clients.
"""

import math

import numpy as np
from numba import carray, njit

from kinfed.core import rng
from kinfed.data import DRAW_BITS, MOST_EXAMPLES
from kinfed.engine.compiled.products import add_products, products_of_rows
from kinfed.engine.compiled.vector_code import bytes_at, floats_at, ints_at, longs_at, prefetch
from kinfed.engine.compiled.vector_functions import add_sum_of_rows, add_to_rows, softmax_of, tanh_of

INPUTS, OUTPUTS, WEIGHT, BIAS, ACTIVATION, PLACE = range(6)  # PLACE: outputs of all layers below it
ABSENT = -1  # the BIAS of a layer without one
RELU, TANH = 1, 2
KIND, DECAY, MOMENTUM, NESTEROV, CLIP, BETA_1, BETA_2, EPS = range(8)  # of an optimizer's `rule`
PLAIN, SGD, ADAM, ADAMW = range(4)
FLOATS, BYTES, INTS, LONGS = range(4)  # what examples are stored as; whole numbers of 4 or 8 bytes are of vectors
SIGN, THRESHOLD = range(2)  # of a `loss` of residuals: whether only their signs count, and how large they may be
CACHE_LINE = 64  # bytes
CLIP_MARGIN = 1e-6  # as kinfed.engine.training.optimizers adds it to a norm that divides

# numba compiles a function anew for a literal whole number among its arguments: np.int64(1) is none.
compiled = njit(nogil=True, error_model="numpy")
inlined = njit(nogil=True, error_model="numpy", inline="always")  # in what calls it, of which there is one


@compiled
def floats(address, count):
    """The array of `count` numbers at an address."""
    return carray(floats_at(address), count)


@compiled
def row_of(rows, i):
    """The address of client i's row."""
    return rows.address + 4 * i * rows.distance


@compiled
def copy(source, target, count):
    """Copy numbers; assigning a slice does the same, and takes numba seconds more to compile."""
    a, b = floats(source, count), floats(target, count)
    for i in range(count):
        b[i] = a[i]


@compiled
def read_example(source, number, distance, x):
    """Write one example [length, width] to x, with `distance` numbers from piece to piece: (raw - mean) * factor, or
    the vectors [V, width] of which raw holds the numbers."""
    raw, kind, mean, factor = source.raw, source.kind, source.mean, source.factor
    length, width = source.length, source.width
    size = length * width
    for t in range(length):
        out = floats(x + 4 * t * distance, width)
        if kind == BYTES:
            whole = carray(bytes_at(raw + number * size + t * width), width)
            for d in range(width):
                out[d] = (np.float32(whole[d]) - mean[t * width + d]) * factor[t * width + d]
        elif kind == FLOATS:
            real = floats(raw + 4 * (number * size + t * width), width)
            for d in range(width):
                out[d] = (real[d] - mean[t * width + d]) * factor[t * width + d]
        else:
            place = number * length + t
            if kind == INTS:
                which = np.int64(carray(ints_at(raw + 4 * place), 1)[0])
            else:
                which = carray(longs_at(raw + 8 * place), 1)[0]
            copy(source.vectors + 4 * which * width, x + 4 * t * distance, width)


@compiled
def prefetch_example(source, number):
    """Bring the memory of one example nearer while another one is read: they lie anywhere among all examples."""
    if source.kind in (BYTES, FLOATS):
        size = source.length * source.width
        nbytes = size if source.kind == BYTES else 4 * size
        for line in range(0, nbytes, CACHE_LINE):
            prefetch(source.raw + number * nbytes + line)


@compiled
def read_batch(source, windows, order, offset, i, s, work):
    """Write the examples of client i's step s to x, y and weight of `work`, as kinfed.data.examples.windows says, and
    return how many there are. The client's orders begin at `offset`."""
    start, count, batch, rows = windows.start[i], windows.counts[i], windows.batch, windows.rows
    labels, importance, y, weight = source.labels, windows.importance, work.y, work.weight
    if windows.by_epoch:
        per_epoch = (count + batch - 1) // batch
        inside = (s % per_epoch) * batch
        size = min(batch, count - inside)
        position = (s // per_epoch) * count + inside
    else:
        size = min(batch, count)
        position = s * size
    for b in range(size):
        place = start + order[offset + position + b]
        number = rows[place]
        if b + 1 < size:
            prefetch_example(source, rows[start + order[offset + position + b + 1]])
        read_example(source, number, size * source.width, work.x + 4 * b * source.width)
        y[b], weight[b] = labels[number], np.float32(1.0) / np.float32(size)
        if len(importance) > 0:
            weight[b] *= importance[place]
    return size


def dense_forward(network, row, x, work, batch):
    """Outputs of every layer, activated, in `hidden`; those of the last one are the logits, whose address is given."""
    net, hidden, below = network.layers, work.hidden, x
    for layer in range(len(net)):
        inputs, outputs, bias = net[layer, INPUTS], net[layer, OUTPUTS], net[layer, BIAS]
        above = hidden + 4 * batch * net[layer, PLACE]
        weight = row + 4 * net[layer, WEIGHT]
        products_of_rows(batch, outputs, inputs, below, inputs, weight, inputs, above, outputs)
        h = floats(above, batch * outputs)
        if bias != ABSENT:
            add_to_rows(above, batch, outputs, row + 4 * bias)
        if net[layer, ACTIVATION] == RELU:
            for i in range(batch * outputs):
                h[i] = np.float32(0.0) if h[i] < np.float32(0.0) else h[i]  # NaN stays
        elif net[layer, ACTIVATION] == TANH:
            tanh_of(above, batch * outputs)
        below = above
    return below


def delta_of_cross_entropy(network, outputs, work, batch):
    """weight * (softmax(z) - onehot(y))."""
    delta, y, weight, classes = work.delta, work.y, work.weight, network.outputs
    d = floats(delta, batch * classes)
    for b in range(batch):
        at = b * classes
        softmax_of(outputs + 4 * at, classes, weight[b], delta + 4 * at)
        d[at + y[b]] -= weight[b]


def delta_of_residuals(network, outputs, work, batch):
    """weight * ∂loss/∂z, with the slope as in kinfed.engine.contract.objective: sign(r), or r up to a threshold."""
    z, d, loss = floats(outputs, batch), floats(work.delta, batch), network.loss
    most = np.float32(loss[THRESHOLD])
    for b in range(batch):
        r = z[b] - work.y[b]
        slope = np.sign(r) if loss[SIGN] != 0 else min(max(r, -most), most)
        d[b] = work.weight[b] * (slope if r == r else r)


def add_cross_entropies(network, outputs, work, batch, scores, i):
    """Add how many predictions are right, and the cross-entropies, to entry i."""
    classes, y = network.outputs, work.y
    z = floats(outputs, batch * classes)
    for b in range(batch):
        at = b * classes
        best = 0
        for c in range(1, classes):
            if z[at + c] > z[at + best]:
                best = c
        total = 0.0
        for c in range(classes):
            total += math.exp(z[at + c] - z[at + best])
        nll = math.log(total) + np.float64(z[at + best]) - np.float64(z[at + y[b]])
        scores.loss[i] += nll
        # NaN has no largest entry; a model that gives it is never right, whatever `best` says.
        if best == y[b] and math.isfinite(nll):
            scores.correct[i] += 1.0


def add_residual_losses(network, outputs, work, batch, scores, i):
    """|r|, or Huber's loss of r, which is r²/2 below the threshold."""
    z, rule = floats(outputs, batch), network.loss
    for b in range(batch):
        size = np.float64(abs(z[b] - work.y[b]))
        inside = min(size, rule[THRESHOLD]) if size == size else size
        scores.loss[i] += size if rule[SIGN] != 0 else inside * (size - inside / 2)


@inlined
def _delta_below(net, layer, row, hidden, delta, below, batch):
    """The delta at the outputs of the layer before, from the delta at those of this one."""
    inputs, outputs = net[layer, INPUTS], net[layer, OUTPUTS]
    d, h = floats(below, batch * inputs), floats(hidden + 4 * batch * net[layer - 1, PLACE], batch * inputs)
    d[:] = np.float32(0.0)
    weight = row + 4 * net[layer, WEIGHT]
    add_products(batch, inputs, outputs, 1.0, delta, outputs, np.int64(1), weight, inputs, below, inputs)
    if net[layer - 1, ACTIVATION] == RELU:
        for i in range(batch * inputs):
            d[i] = np.float32(0.0) if h[i] <= np.float32(0.0) else d[i]
    elif net[layer - 1, ACTIVATION] == TANH:
        for i in range(batch * inputs):
            d[i] *= np.float32(1.0) - h[i] * h[i]


@compiled
def shift(row, target, begin, count, terms):
    """x <- x - rate * (lam * (x - center) + drift + decay * x) for some columns, where the target is the row itself."""
    if target != row:
        return
    x, step = floats(row + 4 * begin, count), np.float32(terms.rate)
    kappa, hold = np.float32(terms.decay), np.float32(terms.lam)
    if terms.center != 0:
        c = floats(terms.center + 4 * begin, count)
        for i in range(count):
            x[i] -= step * (hold * (x[i] - c[i]) + kappa * x[i])
    elif terms.decay != 0:
        for i in range(count):
            x[i] -= step * (kappa * x[i])
    if terms.drift != 0:
        g = floats(terms.drift + 4 * begin, count)
        for i in range(count):
            x[i] -= step * g[i]


def dense_backward(network, row, target, scale, x, work, batch, terms):
    """Add scale * gradient to `target`, layer by layer from the last one; `network.trains` is [layers, 2]."""
    net, trains, lowest, hidden, delta, spare = network.layers, network.trains, 0, work.hidden, work.delta, work.spare
    while lowest < len(net) - 1 and trains[lowest, 0] + trains[lowest, 1] == 0:
        lowest += 1
    for layer in range(len(net) - 1, lowest - 1, -1):
        inputs, outputs, bias = net[layer, INPUTS], net[layer, OUTPUTS], net[layer, BIAS]
        values = x if layer == 0 else hidden + 4 * batch * net[layer - 1, PLACE]
        if layer > lowest:
            _delta_below(net, layer, row, hidden, delta, spare, batch)
        if trains[layer, 0]:
            begin = net[layer, WEIGHT]
            shift(row, target, begin, inputs * outputs, terms)
            add_products(
                outputs, inputs, batch, scale, delta, np.int64(1), outputs, values, inputs, target + 4 * begin, inputs
            )
        if bias != ABSENT and trains[layer, 1]:
            shift(row, target, bias, outputs, terms)
            add_sum_of_rows(delta, batch, outputs, np.float32(scale), target + 4 * bias)
        delta, spare = spare, delta


@inlined
def optimizer_step(row, optimizer, terms, client):
    """One step of a client's optimizer along gradient + lam * (x - center) + drift, clipped, where the mask is."""
    mask, rule, count = optimizer.mask, optimizer.rule, len(optimizer.mask)
    x, g = floats(row, count), floats(optimizer.gradient, count)
    first, second = row_of(optimizer.first, client), row_of(optimizer.second, client)
    if terms.center != 0:
        c, hold = floats(terms.center, count), np.float32(terms.lam)
        for i in range(count):
            g[i] += hold * (x[i] - c[i])
    if terms.drift != 0:
        d = floats(terms.drift, count)
        for i in range(count):
            g[i] += d[i]
    if rule[CLIP] > 0:
        square = 0.0
        for i in range(count):
            if mask[i]:
                square += np.float64(g[i]) * np.float64(g[i])
        factor = np.float32(min(1.0, rule[CLIP] / (math.sqrt(square) + CLIP_MARGIN)))
        if factor != np.float32(1.0):
            for i in range(count):
                g[i] *= factor
    if rule[KIND] == ADAM or rule[KIND] == ADAMW:
        steps = np.float64(optimizer.taken[client])
        _adam(x, g, mask, rule, terms.rate, floats(first, count), floats(second, count), steps)
    else:
        _sgd(x, g, mask, rule, terms.rate, first)


@inlined
def _sgd(x, g, mask, rule, rate, velocity):
    """g <- g + decay x, v <- momentum v + g, x <- x - rate v; Nesterov's form steps along g + momentum v."""
    step, decay, momentum = np.float32(rate), np.float32(rule[DECAY]), np.float32(rule[MOMENTUM])
    if velocity == 0:
        for i in range(len(mask)):
            if mask[i]:
                x[i] -= step * (g[i] + decay * x[i])
        return
    v, ahead = floats(velocity, len(mask)), rule[NESTEROV] != 0
    for i in range(len(mask)):
        if mask[i]:
            along = g[i] + decay * x[i]
            v[i] = momentum * v[i] + along
            x[i] -= step * (along + momentum * v[i] if ahead else v[i])


@inlined
def _adam(x, g, mask, rule, rate, first, second, steps):
    """Adam and AdamW as torch.optim defines them."""
    beta_1, beta_2, decay = np.float32(rule[BETA_1]), np.float32(rule[BETA_2]), np.float32(rule[DECAY])
    step = np.float32(rate / (1.0 - rule[BETA_1] ** steps))
    root, eps = np.float32(math.sqrt(1.0 - rule[BETA_2] ** steps)), np.float32(rule[EPS])
    shrink = np.float32(1.0 - rate * rule[DECAY])
    for i in range(len(mask)):
        if mask[i]:
            along = g[i]
            if rule[KIND] == ADAMW:
                x[i] *= shrink
            else:
                along += decay * x[i]
            first[i] += (np.float32(1.0) - beta_1) * (along - first[i])
            second[i] = beta_2 * second[i] + (np.float32(1.0) - beta_2) * along * along
            x[i] -= step * first[i] / (np.sqrt(second[i]) / root + eps)


PLACE_BITS = 63 - DRAW_BITS  # for the place of an example behind its draw, so that equal draws keep their places
RUN = 8  # examples that are sorted one by one, before runs are merged

(_SHIFT_1, _FACTOR_1), (_SHIFT_2, _FACTOR_2), (_SHIFT_3, _) = rng.ROUNDS
_DROPPED = np.uint64(64 - DRAW_BITS)
_PLACES = np.int64(MOST_EXAMPLES - 1)


@compiled
def _mixed(x):
    """Mix bits as kinfed.core.rng does."""
    x = (x ^ (x >> _SHIFT_1)) * _FACTOR_1
    x = (x ^ (x >> _SHIFT_2)) * _FACTOR_2
    return x ^ (x >> _SHIFT_3)


@compiled
def draw_orders(key, count, epochs, order, spare):
    """The orders of `epochs` epochs of one client in `order` [epochs * count]; `spare` holds [count] numbers."""
    for epoch in range(epochs):
        first = epoch * count
        epoch_key = _mixed(_mixed(key + rng.STEP) ^ (np.uint64(epoch) * rng.FACTOR + rng.STEP))
        for place in range(count):
            draw = _mixed(_mixed(epoch_key + np.uint64(place) * rng.STEP) + rng.STEP)
            order[first + place] = (np.int64(draw >> _DROPPED) << PLACE_BITS) | place
        _sort(order[first : first + count], spare)
        for place in range(first, first + count):
            order[place] &= _PLACES


@compiled
def _sort(x, spare):
    """Sort in place by merging runs that double in length; numpy's sort takes numba seconds more to compile."""
    count = len(x)
    for begin in range(0, count, RUN):
        for i in range(begin + 1, min(begin + RUN, count)):
            value, j = x[i], i
            while j > begin and x[j - 1] > value:
                x[j] = x[j - 1]
                j -= 1
            x[j] = value
    length = RUN
    while length < count:
        for begin in range(0, count - length, 2 * length):
            _merge(x, begin, begin + length, min(begin + 2 * length, count), spare)
        length *= 2


@compiled
def _merge(x, begin, middle, end, spare):
    """Two sorted runs, side by side, become one."""
    left = middle - begin
    for i in range(left):
        spare[i] = x[begin + i]
    i, j, k = 0, middle, begin
    while i < left and j < end:
        one, other = spare[i], x[j]
        first = one <= other
        x[k] = one if first else other
        i, j, k = i + first, j + (not first), k + 1
    while i < left:
        x[k] = spare[i]
        i, k = i + 1, k + 1
