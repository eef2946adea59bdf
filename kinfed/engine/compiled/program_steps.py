"""Update programs of several models (kinfed.engine.contract.update_program), compiled: all batches of every client in
one call."""

from __future__ import annotations

import numpy as np
from numba import njit

from kinfed.engine.compiled import fused_net as form
from kinfed.engine.compiled import kernel_arguments as args
from kinfed.engine.compiled.fused_choice import backward, delta_of_loss, forward
from kinfed.engine.compiled.fused_steps import floats, read_batch
from kinfed.engine.compiled.kernel_arguments import StepTerms
from kinfed.engine.compiled.products import products_of_rows, slope_tile

TOGETHER = 4096  # numbers whose products are summed in their own type

compiled = njit(nogil=True, error_model="numpy")


@compiled
def mix(result, base, toward, share, count):
    """Mix as torch.lerp does: exactly `base` at share 0, and exactly `toward` at 1."""
    out, a, b = floats(result, count), floats(base, count), floats(toward, count)
    near, far = np.float32(share), np.float32(1.0) - np.float32(share)
    if near < np.float32(0.5):
        for i in range(count):
            out[i] = a[i] + near * (b[i] - a[i])
    else:
        for i in range(count):
            out[i] = b[i] - far * (b[i] - a[i])


@compiled
def add_scaled(target, source, scale, count):
    """target <- target + scale * source."""
    x, y, factor = floats(target, count), floats(source, count), np.float32(scale)
    for i in range(count):
        x[i] += factor * y[i]


@compiled
def add(result, base, direction, scale, count):
    """result <- base + scale * direction."""
    out, x, y, factor = floats(result, count), floats(base, count), floats(direction, count), np.float32(scale)
    for i in range(count):
        out[i] = x[i] + factor * y[i]


@compiled
def norm(model, count, sums):
    """The norm of a model, whose squares are added up in float64."""
    total, part = 0.0, floats(sums, 1)
    for begin in range(0, count, TOGETHER):
        size, place = min(np.int64(TOGETHER), count - begin), model + 4 * begin
        products_of_rows(np.int64(1), np.int64(1), size, place, size, place, size, sums, np.int64(1))
        total += np.float64(part[0])
    return np.sqrt(total)


@compiled
def collect(windows, model, step, begin, width, count):
    """Add model / width to the window of the step."""
    if step >= begin:
        window = np.int64((step - begin) // width)
        add_scaled(windows + 4 * window * count, model, 1.0 / width, count)


@compiled
def slope(gradient, base, toward, count, sums):
    """⟨gradient, toward - base⟩, whose parts are added up in float64."""
    total, part = 0.0, floats(sums, 1)
    for begin in range(0, count, TOGETHER):
        size, place = min(np.int64(TOGETHER), count - begin), 4 * begin
        slope_tile(gradient + place, base + place, toward + place, size, sums)
        total += np.float64(part[0])
    return total


@compiled
def number_of(numbers, which, i):
    """A client's number; 1 where there is none."""
    return 1.0 if which == form.NONE else numbers[which, i]


def run_program(
    network: args.Network, source: args.ExampleSource, windows: args.BatchWindows, streams: args.OrderStreams,
    tables: args.ProgramTables, work: args.Work,
) -> None:  # fmt: skip
    """All steps of an update program (kinfed.engine.contract.update_program) with every batch of every client; streams
    have batches of the same sizes. tables.address becomes that of the next client, and of the next."""
    nothing, columns, spare = np.int64(0), network.columns, work.spare
    what, amount, address, numbers, gradient = (
        tables.what, tables.amount, tables.address, tables.numbers, tables.gradient
    )  # fmt: skip
    for i in range(len(windows.steps)):
        for s in range(windows.steps[i]):
            size, stream = nothing, np.int64(-1)
            for m in range(len(what)):
                code, by = what[m], amount[m]
                model, at = address[code[form.RESULT]], address[code[form.AT]]
                rate = by[form.RATE] * number_of(numbers, code[form.NUMBER], i)
                if code[form.KIND] == form.MIX:
                    mix(model, at, address[code[form.OTHER]], rate, columns)
                    continue
                if code[form.KIND] == form.ADD:
                    add(model, at, address[code[form.OTHER]], rate, columns)
                    continue
                if code[form.KIND] == form.NORM:  # `spare` is free between two gradients
                    size_of_model = max(norm(at, columns, spare), by[form.LEAST])
                    numbers[code[form.LEARNT], i] = by[form.RATE] * size_of_model ** by[form.POWER]
                    continue
                if code[form.KIND] == form.COLLECT:
                    collect(model, at, s, numbers[code[form.NUMBER], i], numbers[code[form.LEARNT], i], columns)
                    continue
                if code[form.STREAM] != stream:
                    stream = code[form.STREAM]
                    size = read_batch(source, windows, streams.order[stream], streams.offset[i], i, s, work)
                learns = code[form.LEARNT] != form.NONE and (s == 0 or code[form.FIRST_ONLY] == 0)
                center = nothing if model != at or code[form.OTHER] == form.NONE else address[code[form.OTHER]]
                target, scale = (gradient, 1.0) if learns else (model, -rate)
                if learns or code[form.KIND] == form.GRADIENT:
                    floats(target, columns)[:] = np.float32(0.0)
                for _ in range(code[form.TIMES]):  # the rest of a step is part of it where the target is the row itself
                    outputs = forward(network, at, work.x, work, size)
                    delta_of_loss(network, outputs, work, size)
                    terms = StepTerms(rate, by[form.LAM], center, nothing, by[form.DECAY])
                    backward(network, at, target, scale, work.x, work, size, terms)
                if model != at and by[form.DECAY] != 0:
                    add_scaled(target, at, scale * by[form.DECAY], columns)
                if learns:
                    along = slope(gradient, address[code[form.BASE]], address[code[form.TOWARD]], columns, spare)
                    number = numbers[code[form.LEARNT], i] - by[form.LEARN_RATE] * along
                    numbers[code[form.LEARNT], i] = min(max(number, 0.0), 1.0) if number == number else number
                    add_scaled(model, gradient, -rate, columns)
        for place in range(len(address)):
            address[place] += 4 * tables.distance[place]
