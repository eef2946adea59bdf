"""The compiled calls of the fused backend: all local steps of some clients, one step on a batch, and scores.

Each call takes many clients, one after the other, and runs without the interpreter's lock. Compiling takes a few
seconds, once: numba keeps the machine code in its cache on disk, beside this file or, where that cannot be written, in
the user's cache folder (NUMBA_CACHE_DIR names another one). Where there is no such place, or what lies there cannot be
read, code is compiled for this process alone.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types

from kinfed.engine import fused_steps, products, tiles
from kinfed.engine.fused_steps import (
    DECAY,
    KIND,
    OUTPUTS,
    PLAIN,
    backward,
    delta_of_cross_entropy,
    floats,
    forward,
    move,
    read_example,
)

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


_INT, _FLOAT = types.intp, types.float64
_INTS, _FLOATS, _SINGLES, _BYTES = (kind[::1] for kind in (types.int64, types.float64, types.float32, types.uint8))
_NET, _SINGLE_ROWS, _INT_ROWS = types.int64[:, ::1], types.float32[:, ::1], types.int64[:, ::1]
_ROWS = (_INT, _INT)  # address, and numbers from row to row
_MODEL = (_NET, _NET, *_ROWS)  # net, trains, theta
_SOURCE = (_INT, types.boolean, _SINGLES, _SINGLES, _INTS)  # raw, is_bytes, mean, factor, labels
# rows, start, count, steps, order, offset, importance, batch, by_epoch
_WINDOWS = (*[_INTS] * 6, _SINGLES, _INT, types.boolean)
_TERMS = (_FLOATS, _FLOATS, *_ROWS, *_ROWS, _FLOATS)  # rates, lams, center, drift, rule
_MEMORY = (_INT, _INT, _INT, _INT, _INTS, _SINGLES)  # x, hidden, delta, spare, y, weight


@cache
def _kernel(name: str) -> Callable[..., None]:
    make, signature = _KERNELS[name]
    return _compile(make(_stamp()), types.void(*signature))


def compiled_kernel(name: str) -> Callable[..., None]:
    """`train`, `step` or `score`, compiled at the first call; threads that come at the same time wait."""
    with _LOCK:
        return _kernel(name)


def _compile(function: Callable[..., None], signature: Any) -> Callable[..., None]:
    try:
        kernel = njit(cache=True, nogil=True, error_model="numpy")(function)
        kernel.compile(signature)
    except _CACHE_ERRORS:
        kernel = njit(nogil=True, error_model="numpy")(function)
        kernel.compile(signature)
    return kernel


def _stamp() -> str:
    """Of all code that goes into a kernel: numba's cache looks at a kernel's own file and at what it closes over."""
    files = [Path(str(module.__file__)).read_bytes() for module in (tiles, products, fused_steps)]
    return hashlib.blake2b(b"".join(files), digest_size=8).hexdigest()


def _make_train(stamp: str) -> Callable[..., None]:
    def train(
        net, trains, theta, theta_row, raw, is_bytes, mean, factor, labels,
        rows, start, count, steps, order, offset, importance, batch, by_epoch,
        rates, lams, center, center_row, drift, drift_row, rule,
        mask, first, first_row, second, second_row, taken, gradient,
        x, hidden, delta, spare, y, weight,
    ):  # fmt: skip
        """All local steps of every client, on the windows of kinfed.data.windows: theta changes in place.
        `importance` is of every entry of `rows`, or empty where all count alike."""
        stamp  # noqa: B018  (closed over)
        inputs, classes, columns, nothing = len(mean), net[len(net) - 1, OUTPUTS], len(mask), np.int64(0)
        for i in range(len(steps)):
            row = theta + 4 * i * theta_row
            near = center + 4 * i * center_row
            along = drift + 4 * i * drift_row
            per_epoch = (count[i] + batch - 1) // batch
            for s in range(steps[i]):
                if by_epoch:
                    inside = (s % per_epoch) * batch
                    size = min(batch, count[i] - inside)
                    position = (s // per_epoch) * count[i] + inside
                else:
                    size = min(batch, count[i])
                    position = s * size
                for b in range(size):
                    place = start[i] + order[offset[i] + position + b]
                    number = rows[place]
                    read_example(raw, is_bytes, number, mean, factor, x + 4 * b * inputs)
                    y[b], weight[b] = labels[number], np.float32(1.0) / np.float32(size)
                    if len(importance) > 0:
                        weight[b] *= importance[place]
                logits = forward(net, row, x, hidden, size)
                delta_of_cross_entropy(logits, delta, y, weight, size, classes)
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
        net, trains, theta, theta_row, x, x_row, labels, weights, times,
        rates, lams, center, center_row, drift, drift_row, rule, gradient, gradient_row, columns,
        hidden, delta, spare, y, weight,
    ):  # fmt: skip
        """On one batch per client, either its gradient or `times` steps of plain descent in place."""
        stamp  # noqa: B018  (closed over)
        classes, nothing = net[len(net) - 1, OUTPUTS], np.int64(0)
        for i in range(len(labels)):
            row, examples = theta + 4 * i * theta_row, x + 4 * i * x_row
            size = np.int64(0)
            for b in range(labels.shape[1]):
                y[b], weight[b] = labels[i, b], weights[i, b]
                if weight[b] != 0:
                    size = np.int64(b + 1)
            target = gradient + 4 * i * gradient_row
            if gradient != 0:
                floats(target, columns)[:] = np.float32(0.0)
            for _ in range(times):
                logits = forward(net, row, examples, hidden, size)
                delta_of_cross_entropy(logits, delta, y, weight, size, classes)
                if gradient != 0:
                    backward(net, trains, row, target, 1.0, examples, hidden, delta, spare, size, 0.0, 0.0, nothing,
                             nothing, 0.0)  # fmt: skip
                else:
                    backward(net, trains, row, row, -rates[i], examples, hidden, delta, spare, size,
                             rates[i], lams[i], center + 4 * i * center_row, drift + 4 * i * drift_row,
                             rule[DECAY])  # fmt: skip

    return step


def _make_score(stamp: str) -> Callable[..., None]:
    def score(
        net, trains, theta, theta_row, raw, is_bytes, mean, factor, labels, rows, start, count, width,
        correct, loss, x, hidden, delta, spare, y, weight,
    ):  # fmt: skip
        """Correct predictions and summed cross-entropy of every client's model on its examples, `width` at a time."""
        stamp  # noqa: B018  (closed over)
        inputs, classes = len(mean), net[len(net) - 1, OUTPUTS]
        for i in range(len(start)):
            row = theta + 4 * i * theta_row
            for begin in range(0, count[i], width):
                size = min(width, count[i] - begin)
                for b in range(size):
                    number = rows[start[i] + begin + b]
                    read_example(raw, is_bytes, number, mean, factor, x + 4 * b * inputs)
                    y[b] = labels[number]
                z = floats(forward(net, row, x, hidden, size), size * classes)
                for b in range(size):
                    at = b * classes
                    best = 0
                    for c in range(1, classes):
                        if z[at + c] > z[at + best]:
                            best = c
                    total = 0.0
                    for c in range(classes):
                        total += math.exp(z[at + c] - z[at + best])
                    nll = math.log(total) + np.float64(z[at + best]) - np.float64(z[at + y[b]])
                    loss[i] += nll
                    # NaN has no largest entry; a model that gives it is never right, whatever `best` says.
                    if best == y[b] and math.isfinite(nll):
                        correct[i] += 1.0

    return score


_KERNELS = {
    "train": (
        _make_train,
        (
            *_MODEL,
            *_SOURCE,
            *_WINDOWS,
            *_TERMS,
            _BYTES,
            *_ROWS,
            *_ROWS,
            _SINGLES,
            _INT,
            *_MEMORY,
        ),
    ),
    "step": (_make_step, (*_MODEL, _INT, _INT, _INT_ROWS, _SINGLE_ROWS, _INT, *_TERMS, *_ROWS, _INT, *_MEMORY[1:])),
    "score": (_make_score, (*_MODEL, *_SOURCE, _INTS, _INTS, _INTS, _INT, _FLOATS, _FLOATS, *_MEMORY)),
}
