"""Counter-based random draws: every number is a hash of (seed, purpose, round, client, ...).

No generator object exists and no global one is touched, so the order of evaluation, chunking, the pool and a
resumed run cannot change any draw, and two methods that ask the same question get the same answer.

A *key* is an int64 (a Python int, or a tensor with one key per client); `fold` makes new keys from old ones.
The mixing function is the finalizer of SplitMix64 (Steele, Lea, Flood 2014) in wrapping int64 arithmetic,
applied twice per fold; keys and draws pass the usual uniformity and correlation checks in tests/core/test_rng.py.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Key = int | Tensor
Words = NDArray[np.uint64]

_MULTIPLY_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLY_2 = 0x94D049BB133111EB - (1 << 64)
_INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)
_ALL_BITS = (1 << 64) - 1
FACTOR, STEP = np.uint64(_MULTIPLY_1 & _ALL_BITS), np.uint64(_INCREMENT & _ALL_BITS)
ROUNDS = (np.uint64(30), FACTOR), (np.uint64(27), np.uint64(_MULTIPLY_2 & _ALL_BITS)), (np.uint64(31), None)
_BLOCK = 1 << 14  # draws that are mixed at once: their 128 KB stay in a core's cache


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical (zero-filling) shift; torch's >> on int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLY_2
    return x ^ _shift_right(x, 31)


def _tensor(value: Key) -> Tensor:
    # Ids of a narrower type would otherwise wrap at their own width and give other keys than the same ids in int64.
    return value.to(torch.int64) if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.int64)


@lru_cache(maxsize=1024)
def root(seed: int, purpose: str) -> Tensor:
    """The key of one purpose ("batches", "sampling", "init", ...) under a seed. Scalar int64 tensor, one object for all
    callers: never written to."""
    digest = hashlib.blake2b(purpose.encode(), digest_size=8).digest()
    label = int.from_bytes(digest, "little", signed=True)
    return fold(label, seed)


def fold(key: Key, *values: Key) -> Tensor:
    """A new key from `key` and each value in turn; tensors broadcast, so ids [n] give one key per client."""
    terms = [key, *values]
    if all(not isinstance(term, Tensor) or term.device.type == "cpu" for term in terms):
        while len(terms) > 1 and (numbers := _plain_numbers(terms[:2])) is not None:
            terms[:2] = [fold_number(*numbers)]
        if len(terms) == 1:
            return _tensor(terms[0])
        words = [np.atleast_1d(_words(term)) for term in terms]  # numpy warns where single numbers wrap
        return torch.from_numpy(fold_words(*words).view(np.int64))  # one of them has axes: those of the result
    out = _tensor(key)
    for value in values:
        out = _mix(_mix(out + _INCREMENT) ^ (_tensor(value) * _MULTIPLY_1 + _INCREMENT))
    return out


def fold_words(key: Words, *values: Words) -> Words:
    """`fold` of arrays with at least one axis."""
    for value in values:
        key = _mixed(_mixed(key + STEP) ^ (value * FACTOR + STEP))
    return key


def _plain_numbers(terms: Sequence[Key]) -> list[int] | None:
    """Plain numbers of Python, which are mixed in a fraction of the time of arrays; None if one of them has axes."""
    if any(isinstance(term, Tensor) and term.dim() for term in terms):
        return None
    return [int(term) for term in terms]


def fold_number(key: int, *values: int) -> int:
    """`fold` of plain numbers to a plain number (int64), many times as fast as with tensors."""
    for value in values:
        key = _mix_number(_mix_number(key + _INCREMENT) ^ (value * _MULTIPLY_1 + _INCREMENT))
    return key - (1 << 64) if key >> 63 else key


def _mix_number(x: int) -> int:
    """`_mix` of one number, in [0, 2^64)."""
    x &= _ALL_BITS
    x = ((x ^ (x >> 30)) * _MULTIPLY_1) & _ALL_BITS
    x = ((x ^ (x >> 27)) * _MULTIPLY_2) & _ALL_BITS
    return x ^ (x >> 31)


def bits(key: Tensor, count: int) -> Tensor:
    """`count` independent int64 draws for every key: shape key.shape + [count]."""
    return at(key[..., None], torch.arange(count, device=key.device))


def at(key: Tensor, position: Tensor) -> Tensor:
    """The draws of `key` at given positions (broadcast): bits(key, n)[..., i] == at(key, i)."""
    if key.device.type != "cpu" or key.dim() + position.dim() == 0:
        return _mix(_mix(key + position * _INCREMENT) + _INCREMENT)
    return torch.from_numpy(words_at(_words(key), _words(position)).view(np.int64))


def words_at(key: Words, position: Words) -> Words:
    """`at` of arrays."""
    draw = _mixed(key + position * STEP)
    draw += STEP
    return _mixed(draw)


def to_unit(draw: Tensor) -> Tensor:
    """int64 bits -> float64 uniform on [0, 1) with 53 random bits."""
    return _shift_right(draw, 11).to(torch.float64) * 2.0**-53


def uniform(key: Tensor, count: int) -> Tensor:
    return to_unit(bits(key, count))


def normal(key: Tensor, count: int) -> Tensor:
    """Standard normal draws in float64 (Box-Muller; both halves of a pair are used).

    As with `bits`, asking for more draws leaves the first ones as they were."""
    pairs = (count + 1) // 2
    u = uniform(key, 2 * pairs).reshape(*key.shape, pairs, 2)
    radius = torch.sqrt(-2.0 * torch.log1p(-u[..., 0]))
    angle = 2.0 * math.pi * u[..., 1]
    return torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1).flatten(-2)[..., :count]


def permutation(key: Tensor, count: int) -> Tensor:
    """A random order of range(count) for a scalar key."""
    return torch.argsort(bits(key, count), stable=True)


def choose(key: Tensor, population: int, count: int) -> Tensor:
    """`count` distinct members of range(population), in ascending order."""
    if not 0 <= count <= population:
        raise ValueError(f"cannot choose {count} distinct members of {population}")
    if not count or key.device.type != "cpu":
        return permutation(key, population)[:count].sort().values
    draw = _many_bits(key, population)
    # The first `count` of the permutation without sorting the others: all draws below the last one's, and of equal
    # ones those that come first, as in a stable sort.
    last = np.partition(draw, count - 1)[count - 1]
    ids = np.flatnonzero(draw <= last)
    surplus = len(ids) - count
    if surplus:
        ids = np.setdiff1d(ids, ids[draw[ids] == last][-surplus:])
    return torch.from_numpy(ids)


def _many_bits(key: Tensor, count: int) -> NDArray[np.int64]:
    """bits(key, count) of a scalar key, block by block in the cache: a fifth of the time for a million clients."""
    draw = np.empty(count, np.uint64)
    start, scratch = np.uint64(int(key) & _ALL_BITS), np.empty(min(_BLOCK, count), np.uint64)
    for begin in range(0, count, _BLOCK):
        x = draw[begin : begin + _BLOCK]
        x[:] = np.arange(begin, begin + len(x), dtype=np.uint64)
        x *= STEP
        x += start
        _mix_(x, scratch[: len(x)])
        x += STEP
        _mix_(x, scratch[: len(x)])
    return draw.view(np.int64)


def _words(value: Key) -> Words:
    """The 64 bits of every number, in the processor's memory: numpy mixes few of them in a tenth of torch's time."""
    if isinstance(value, Tensor):
        return value.to(torch.int64).contiguous().numpy().view(np.uint64)
    return np.array(value & _ALL_BITS, np.uint64)


def _mixed(x: Words) -> Words:
    """`_mix` in place, of a fresh array with at least one axis."""
    _mix_(x, np.empty_like(x))
    return x


def _mix_(x: Words, scratch: Words) -> None:
    """`_mix`, in place."""
    for bits, factor in ROUNDS:
        np.right_shift(x, bits, out=scratch)
        x ^= scratch
        if factor is not None:
            x *= factor


def numpy_seed(key: Tensor) -> int:
    """A 32-bit seed for libraries that insist on one (scikit-learn)."""
    return int(key.item()) & 0xFFFFFFFF
