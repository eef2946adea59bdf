"""Random orders of a client's examples, compiled: those of kinfed.data.examples.windows, drawn where they are
needed."""

from __future__ import annotations

import numpy as np
from numba import njit

from kinfed.core import rng
from kinfed.data import DRAW_BITS, MOST_EXAMPLES

PLACE_BITS = 63 - DRAW_BITS  # for the place of an example behind its draw, so that equal draws keep their places
RUN = 8  # examples that are sorted one by one, before runs are merged

(_SHIFT_1, _FACTOR_1), (_SHIFT_2, _FACTOR_2), (_SHIFT_3, _) = rng.ROUNDS
_DROPPED = np.uint64(64 - DRAW_BITS)
_PLACES = np.int64(MOST_EXAMPLES - 1)

compiled = njit(nogil=True, error_model="numpy")


@compiled
def _mixed(x):
    """Mix bits as kinfed.core.rng does."""
    x = (x ^ (x >> _SHIFT_1)) * _FACTOR_1
    x = (x ^ (x >> _SHIFT_2)) * _FACTOR_2
    return x ^ (x >> _SHIFT_3)


@compiled
def draw_orders(key, count, epochs, order, spare):
    """The orders of `epochs` epochs of one client, one after the other, in `order` [epochs * count]; `spare` holds
    [count] numbers."""
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
        mine, other = spare[i], x[j]
        first = mine <= other
        x[k] = mine if first else other
        i, j, k = i + first, j + (not first), k + 1
    while i < left:
        x[k] = spare[i]
        i, k = i + 1, k + 1
