"""The compiled calls of the fused backend: all local steps of some clients, one step on a batch, and scores.

Each call takes many clients, one after the other, and runs without the interpreter's lock. Compiling takes time;
kinfed.engine.compiled.machine_code does it once, and keeps what comes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.core import compiler
from numba.core.registry import cpu_target

from kinfed.engine.compiled.fused_choice import add_losses, backward, delta_of_loss, forward
from kinfed.engine.compiled.fused_moves import move_models
from kinfed.engine.compiled.fused_orders import draw_orders
from kinfed.engine.compiled.fused_steps import DECAY, KIND, PLAIN, copy, floats, move, read_batch, read_example
from kinfed.engine.compiled.kernel_arguments import described, make_reader
from kinfed.engine.compiled.machine_code import MachineCode

_INT = types.intp
_INTS, _KEYS, _FLOATS, _SINGLES, _BYTES = (
    kind[::1] for kind in (types.int64, types.uint64, types.float64, types.float32, types.uint8)
)
_NET, _SINGLE_ROWS, _FLOAT_ROWS = (kind[:, ::1] for kind in (types.int64, types.float32, types.float64))
_NETS = {"dense": _NET, "recurrent": types.Tuple((_NET, types.int64))}
_TARGETS = {"classes": types.int64, "numbers": types.float32}
_ROWS = (_INT, _INT)  # address, and numbers from row to row
_SHAPE = (_INT, _INT, _INT)  # length, width, classes
_SOURCE = (_INT, _INT, _SINGLES, _SINGLES, _INT)  # raw, kind, mean, factor, vectors
_CLIENTS = (*[_INTS] * 4,)  # rows, start, count, steps
_BATCHES = (_SINGLES, _INT, types.boolean)  # importance, batch, by_epoch
_WINDOWS = (*_CLIENTS, _KEYS, *[_INTS] * 3, *_BATCHES)  # key, epochs, order and spare numbers
_STREAMS = (*_CLIENTS, _NET, _INTS, *_BATCHES)  # order of several streams, and offset
_TERMS = (_FLOATS, _FLOATS, *_ROWS, *_ROWS, _FLOATS, _FLOATS)  # rates, lams, center, drift, rule, loss_rule


def compile_kernel(name: str, network: str, target: str) -> MachineCode:
    """`train`, `move`, `step` or `score` of a `dense` or `recurrent` network for `classes` or `numbers`."""
    function, arguments = _KERNELS[name]
    return compile_function(function, tuple(arguments(_NETS[network], _TARGETS[target])))


def compile_function(function: Callable[..., None], arguments: tuple[Any, ...]) -> MachineCode:
    """Machine code of a function with arguments of these types (numba's)."""
    described_arguments = [described(kind) for kind in arguments]
    kernel, read = njit(nogil=True, error_model="numpy")(function), make_reader(arguments)

    def entry(words):
        kernel(*read(words))

    flags = compiler.Flags()
    flags.error_model, flags.nrt = "numpy", True
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True  # both would ask for numba when they are linked
    result = compiler.compile_extra(
        cpu_target.typing_context, cpu_target.target_context, entry, (types.intp,), types.void, flags, {}
    )
    _, _, (content, _) = result.library.serialize_using_object_code()
    return MachineCode(result.fndesc.llvm_func_name, described_arguments, content)


def _memory(target: Any) -> tuple[Any, ...]:
    """x, hidden, delta, spare, y, weight."""
    return *[_INT] * 4, target[::1], _SINGLES


def train(
    net, trains, theta, theta_row, length, width, classes, raw, kind, mean, factor, vectors, labels,
    rows, start, count, steps, key, epochs, order, places, importance, batch, by_epoch,
    rates, lams, center, center_row, drift, drift_row, rule, loss_rule,
    mask, first, first_row, second, second_row, taken, gradient,
    x, hidden, delta, spare, y, weight,
):  # fmt: skip
    """All local steps of every client, on the windows of kinfed.data.examples.windows: theta changes in place."""
    columns, nothing = len(mask), np.int64(0)
    for i in range(len(steps)):
        row = theta + 4 * i * theta_row
        near = center + 4 * i * center_row
        along = drift + 4 * i * drift_row
        draw_orders(key[i], count[i], epochs[i], order, places)
        for s in range(steps[i]):
            size = read_batch(
                s, start[i], count[i], batch, by_epoch, order, nothing, rows, importance, labels,
                raw, kind, mean, factor, vectors, length, width, x, y, weight,
            )  # fmt: skip
            outputs = forward(net, row, x, hidden, spare, size)
            delta_of_loss(outputs, delta, y, weight, size, classes, loss_rule)
            if rule[KIND] == PLAIN:
                backward(net, trains, row, row, -rates[i], x, hidden, delta, spare, size,
                         rates[i], lams[i], near, along, rule[DECAY])  # fmt: skip
            else:
                floats(gradient, columns)[:] = np.float32(0.0)
                backward(net, trains, row, gradient, 1.0, x, hidden, delta, spare, size, 0.0, 0.0, nothing,
                         nothing, 0.0)  # fmt: skip
                taken[i] += np.float32(1.0)
                move(row, gradient, mask, rule, rates[i], lams[i], near, along,
                     first + 4 * i * first_row, second + 4 * i * second_row, np.float64(taken[i]))  # fmt: skip


def step(
    net, trains, theta, theta_row, length, width, classes, examples, examples_row, labels, weights, times,
    rates, lams, center, center_row, drift, drift_row, rule, loss_rule, gradient, gradient_row, columns,
    x, hidden, delta, spare, y, weight,
):  # fmt: skip
    """On one batch per client, either its gradient or `times` steps of plain descent in place."""
    nothing = np.int64(0)
    for i in range(len(labels)):
        row, values = theta + 4 * i * theta_row, examples + 4 * i * examples_row
        size = np.int64(0)
        for b in range(labels.shape[1]):
            y[b], weight[b] = labels[i, b], weights[i, b]
            if weight[b] != 0:
                size = np.int64(b + 1)
        if length > 1:  # [B, T, D] becomes [T, B, D]
            for b in range(size):
                for t in range(length):
                    copy(values + 4 * (b * length + t) * width, x + 4 * (t * size + b) * width, width)
            values = x
        target = gradient + 4 * i * gradient_row
        if gradient != 0:
            floats(target, columns)[:] = np.float32(0.0)
        for _ in range(times):
            outputs = forward(net, row, values, hidden, spare, size)
            delta_of_loss(outputs, delta, y, weight, size, classes, loss_rule)
            if gradient != 0:
                backward(net, trains, row, target, 1.0, values, hidden, delta, spare, size, 0.0, 0.0, nothing,
                         nothing, 0.0)  # fmt: skip
            else:
                backward(net, trains, row, row, -rates[i], values, hidden, delta, spare, size,
                         rates[i], lams[i], center + 4 * i * center_row, drift + 4 * i * drift_row,
                         rule[DECAY])  # fmt: skip


def score(
    net, trains, theta, theta_row, length, width, classes, raw, kind, mean, factor, vectors, labels,
    rows, start, count, together, loss_rule, correct, loss, everything,
    x, hidden, delta, spare, y, weight,
):  # fmt: skip
    """Correct predictions and summed loss of every client's model on its examples, some at a time; outputs of all
    examples [.., classes] are written to `everything`, client after client, where that is an address."""
    written = np.int64(0)
    for i in range(len(start)):
        row = theta + 4 * i * theta_row
        for begin in range(0, count[i], together):
            size = min(together, count[i] - begin)
            for b in range(size):
                number = rows[start[i] + begin + b]
                read_example(raw, kind, number, mean, factor, vectors, length, width, size * width,
                             x + 4 * b * width)  # fmt: skip
                y[b] = labels[number]
            outputs = forward(net, row, x, hidden, spare, size)
            add_losses(outputs, y, size, classes, loss_rule, correct, loss, i)
            if everything != 0:
                copy(outputs, everything + 4 * written * classes, size * classes)
                written += size


_KERNELS: dict[str, tuple[Callable[..., None], Callable[[Any, Any], tuple[Any, ...]]]] = {
    "train": (
        train,
        lambda net, y: (
            net, _NET, *_ROWS, *_SHAPE, *_SOURCE, y[::1], *_WINDOWS, *_TERMS, _BYTES, *_ROWS, *_ROWS, _SINGLES, _INT,
            *_memory(y),
        ),
    ),
    "move": (
        move_models,
        lambda net, y: (
            net, _NET, *_SHAPE, *_SOURCE, y[::1], *_STREAMS, _INTS, _INTS, _FLOAT_ROWS, _NET, _FLOAT_ROWS, _FLOATS,
            _INT, _INT, *_memory(y),
        ),
    ),
    "step": (
        step,
        lambda net, y: (
            net, _NET, *_ROWS, *_SHAPE, _INT, _INT, y[:, ::1], _SINGLE_ROWS, _INT, *_TERMS, *_ROWS, _INT, *_memory(y),
        ),
    ),
    "score": (
        score,
        lambda net, y: (
            net, _NET, *_ROWS, *_SHAPE, *_SOURCE, y[::1], _INTS, _INTS, _INTS, _INT, _FLOATS, _FLOATS, _FLOATS, _INT,
            *_memory(y),
        ),
    ),
}  # fmt: skip
