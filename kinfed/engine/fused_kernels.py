"""The compiled calls of the fused backend: all local steps of some clients, one step on a batch, and scores.

Each call takes many clients, one after the other, and runs without the interpreter's lock. Compiling takes a few
seconds, once: numba keeps the machine code in its cache on disk, beside this file or, where that cannot be written, in
the user's cache folder (NUMBA_CACHE_DIR names another one). Where there is no such place, or what lies there cannot be
read, code is compiled for this process alone.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types

from kinfed.engine import (
    fused_choice,
    fused_moves,
    fused_orders,
    fused_program,
    fused_recurrent,
    fused_steps,
    lstm_cells,
    products,
    tiles,
    vector_code,
)
from kinfed.engine.fused_choice import add_losses, backward, delta_of_loss, forward
from kinfed.engine.fused_orders import draw_orders
from kinfed.engine.fused_steps import DECAY, KIND, PLAIN, copy, floats, move, read_batch, read_example

_CODE = (  # in kernels
    vector_code, tiles, products, lstm_cells, fused_orders, fused_steps, fused_recurrent, fused_choice, fused_program,
    fused_moves,
)  # fmt: skip
_LOCK = threading.Lock()
# Of numba's cache: no place for it, files that cannot be read or written, and such as hold something else. Mistakes in
# the code that is compiled are numba's own errors, none of these.
_CACHE_ERRORS = (
    OSError,
    RuntimeError,
    EOFError,
    pickle.PickleError,
    AttributeError,
    ImportError,
    LookupError,
    ValueError,
)


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


@cache
def _kernel(name: str, network: str, target: str) -> Callable[..., None]:
    make, arguments = _KERNELS[name]
    signature = types.void(*arguments(_NETS[network], _TARGETS[target]))
    return _compile(make(_stamp()), signature)


def compiled_kernel(name: str, network: str, target: str) -> Callable[..., None]:
    """`train`, `move`, `step` or `score` of a `dense` or `recurrent` network for `classes` or `numbers`, compiled at
    the first call; threads that come at the same time wait."""
    with _LOCK:
        return _kernel(name, network, target)


def _compile(function: Callable[..., None], signature: Any) -> Callable[..., None]:
    try:
        kernel = njit(cache=True, nogil=True, error_model="numpy")(function)
        kernel.compile(signature)
    except _CACHE_ERRORS:
        kernel = njit(nogil=True, error_model="numpy")(function)
        kernel.compile(signature)
    kernel.disable_compile()  # arguments of another type are a mistake: numba would compile slower code for them
    return kernel


def _stamp() -> str:
    """Of all code that goes into a kernel: numba's cache looks at a kernel's own file and at what it closes over."""
    files = [Path(str(module.__file__)).read_bytes() for module in _CODE]
    return hashlib.blake2b(b"".join(files), digest_size=8).hexdigest()


def _memory(target: Any) -> tuple[Any, ...]:
    """x, hidden, delta, spare, y, weight."""
    return *[_INT] * 4, target[::1], _SINGLES


def _make_train(stamp: str) -> Callable[..., None]:
    def train(
        net, trains, theta, theta_row, length, width, classes, raw, kind, mean, factor, vectors, labels,
        rows, start, count, steps, key, epochs, order, places, importance, batch, by_epoch,
        rates, lams, center, center_row, drift, drift_row, rule, loss_rule,
        mask, first, first_row, second, second_row, taken, gradient,
        x, hidden, delta, spare, y, weight,
    ):  # fmt: skip
        """All local steps of every client, on the windows of kinfed.data.windows: theta changes in place."""
        stamp  # noqa: B018  (closed over)
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

    return train


def _make_step(stamp: str) -> Callable[..., None]:
    def step(
        net, trains, theta, theta_row, length, width, classes, examples, examples_row, labels, weights, times,
        rates, lams, center, center_row, drift, drift_row, rule, loss_rule, gradient, gradient_row, columns,
        x, hidden, delta, spare, y, weight,
    ):  # fmt: skip
        """On one batch per client, either its gradient or `times` steps of plain descent in place."""
        stamp  # noqa: B018  (closed over)
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

    return step


def _make_score(stamp: str) -> Callable[..., None]:
    def score(
        net, trains, theta, theta_row, length, width, classes, raw, kind, mean, factor, vectors, labels,
        rows, start, count, together, loss_rule, correct, loss, everything,
        x, hidden, delta, spare, y, weight,
    ):  # fmt: skip
        """Correct predictions and summed loss of every client's model on its examples, some at a time; outputs of all
        examples [.., classes] are written to `everything`, client after client, where that is an address."""
        stamp  # noqa: B018  (closed over)
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

    return score


_KERNELS: dict[str, tuple[Callable[[str], Callable[..., None]], Callable[[Any, Any], tuple[Any, ...]]]] = {
    "train": (
        _make_train,
        lambda net, y: (
            net, _NET, *_ROWS, *_SHAPE, *_SOURCE, y[::1], *_WINDOWS, *_TERMS, _BYTES, *_ROWS, *_ROWS, _SINGLES, _INT,
            *_memory(y),
        ),
    ),
    "move": (
        fused_moves.make_kernel,
        lambda net, y: (
            net, _NET, *_SHAPE, *_SOURCE, y[::1], *_STREAMS, _INTS, _INTS, _FLOAT_ROWS, _NET, _FLOAT_ROWS, _FLOATS,
            _INT, _INT, *_memory(y),
        ),
    ),
    "step": (
        _make_step,
        lambda net, y: (
            net, _NET, *_ROWS, *_SHAPE, _INT, _INT, y[:, ::1], _SINGLE_ROWS, _INT, *_TERMS, *_ROWS, _INT, *_memory(y),
        ),
    ),
    "score": (
        _make_score,
        lambda net, y: (
            net, _NET, *_ROWS, *_SHAPE, *_SOURCE, y[::1], _INTS, _INTS, _INTS, _INT, _FLOATS, _FLOATS, _FLOATS, _INT,
            *_memory(y),
        ),
    ),
}  # fmt: skip
