"""Sources of noise.

A source gives standard normal noise for a named gradient: `source(name [n], theta [n, P]) -> [n, P]`. A name stands for
one gradient of one client: which sample of its examples, and the index of the gradient on that sample.

In a simulation noise is a function of (seed, name) like every other draw, so runs repeat and resume bit for bit. At a
real client that would be no noise at all: anyone who knows the seed can subtract it. There a `Secret` takes the place
of the seed. It has to hide two things, the noise and which examples were sampled: epsilon counts on both. And epsilon
counts on answers that are independent of each other: noise that two answers share cancels in their difference, and a
sample that they share is not hidden twice. So every answer has draws of its own.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Context, Decimal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kinfed.core import rng
from kinfed.data import Cohort
from kinfed.errors import ConfigError

Source = Callable[[Tensor, Tensor], Tensor]
Words = NDArray[np.uint64]

BLOCK = 1 << 15  # pairs of draws made at once: few enough to stay in cache
SECRET_BYTES = 32
UNSURE = 2.0**-30  # distance below which floating point does not decide
PRECISE = Context(prec=80)


def seeded_noise(seed: int) -> Source:
    """Noise that everyone with the seed can repeat: for simulations only."""
    root = rng.root(seed, "dp-noise")

    def normal(name: Tensor, theta: Tensor) -> Tensor:
        out = torch.empty(theta.shape, dtype=torch.float32)
        key = rng.fold(root, name)[:, None]
        pairs = (theta.shape[1] + 1) // 2
        width = max(1, BLOCK // max(len(theta), 1))
        for begin in range(0, pairs, width):
            first = 2 * torch.arange(begin, min(begin + width, pairs))
            _box_muller_(out, 2 * begin, rng.to_unit(rng.at(key, first)), rng.to_unit(rng.at(key, first + 1)))
        return out.to(theta.device, theta.dtype)

    return normal


def fresh_noise(name: Tensor, theta: Tensor) -> Tensor:
    """A source of noise that cannot be repeated, by random bytes that are forgotten: for what leaves a server once."""
    return AnswerDraws(secrets.token_bytes(SECRET_BYTES)).noise(name, theta)


@dataclass(frozen=True)
class Secret:
    """A client's own secret; it must never leave the client, and never be shared by two clients."""

    key: bytes

    def __post_init__(self) -> None:
        if (size := len(self.key)) < SECRET_BYTES:
            raise ConfigError(f"a secret has at least {SECRET_BYTES} random bytes; got {size}; use Secret.new()")

    @classmethod
    def new(cls) -> Secret:
        return cls(secrets.token_bytes(SECRET_BYTES))

    def __repr__(self) -> str:
        return "Secret(...)"

    def draws(self, request: bytes, nonce: bytes) -> AnswerDraws:
        """All that is random in the answer to one request.

        `request` is a digest of everything that the answer depends on: the whole order, the client's settings, data
        and state. `nonce` are random bytes for this answer alone (`new_nonce`). Either of them would keep two answers
        apart; with both, no fault in one of them lets two requests have the same noise. An answer that may be asked
        for again is to be kept: with another nonce it is another one, and costs privacy anew."""
        if len(nonce) < SECRET_BYTES:
            raise ConfigError(f"a nonce has {SECRET_BYTES} random bytes; got {len(nonce)}; use new_nonce()")
        return AnswerDraws(_hash(self.key, SECRET_BYTES, "answer", request, nonce))

    def places(self, items: Sequence[bytes]) -> Tensor:
        """float64 [n] in [0, 1): uniform draws, one for each item and always the same for it."""
        draws = [int.from_bytes(_hash(self.key, 8, "place", item), "little") >> 11 for item in items]
        return torch.tensor(draws, dtype=torch.float64) * 2.0**-53


def new_nonce() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


@dataclass(frozen=True, repr=False)
class AnswerDraws:
    """Noise and samples of one answer, all from one key: noise by SHAKE-256 of a gradient's name and its model."""

    key: bytes

    def noise(self, name: Tensor, theta: Tensor) -> Tensor:
        """A `Source`."""
        out = torch.empty(theta.shape, dtype=torch.float32)
        pairs = (theta.shape[1] + 1) // 2
        for row, which in enumerate(name.tolist()):
            model = np.ascontiguousarray(theta[row].detach().cpu().numpy()).tobytes()
            stream = _hash(self.key, 16 * pairs, "noise", which.to_bytes(8, "little", signed=True), model)
            draws = torch.from_numpy(np.frombuffer(stream, "<i8").copy()).reshape(pairs, 2)
            u = rng.to_unit(draws)
            _box_muller_(out[row : row + 1], 0, u[None, :, 0], u[None, :, 1])
        return out.to(theta.device, theta.dtype)

    def whole_noise(self, deviation: int, count: int) -> Tensor:
        """int64 [count]: whole numbers k with chances ∝ exp(−k² / 2 deviation²), exactly (`_discrete_normal`). The same
        ones at every call: once for an answer."""
        blocks = itertools.count()

        def words(number: int) -> Words:
            return np.frombuffer(_hash(self.key, 8 * number, "words", next(blocks).to_bytes(8, "little")), "<u8")

        parts, missing = [np.empty(0, np.int64)], count
        while missing > 0:
            parts.append(_discrete_normal(deviation, min(BLOCK, 2 * missing + 16), words)[:missing])
            missing -= len(parts[-1])
        return torch.from_numpy(np.concatenate(parts))

    def with_secret_sampling(self, data: Cohort) -> Cohort:
        """The same data with training batches sampled by this key instead of the run's seed."""
        seed = int.from_bytes(_hash(self.key, 8, "sampling"), "little", signed=True)
        return replace(data, train=replace(data.train, seed=seed))


def _hash(key: bytes, size: int, purpose: str, *parts: bytes) -> bytes:
    stream = hashlib.shake_256()
    for part in (key, purpose.encode(), *parts):
        stream.update(len(part).to_bytes(8, "little") + part)  # lengths, so that no two inputs read alike
    return stream.digest(size)


def _discrete_normal(deviation: int, attempts: int, words: Callable[[int], Words]) -> NDArray[np.int64]:
    """Draws of the discrete normal distribution of deviation σ, by rejection: about half of the attempts give one.

        v with chance ∝ e^−v,   u uniform on 0 ... σ−1,   k = ±(u + σv),   accepted with chance exp(−γ)
        γ = k² / 2σ² − v + 1/2      which is 0 at least, because k ≥ σv and v²/2 − v ≥ −1/2

    (as Canonne, Kamath, Steinke: The Discrete Gaussian for Differential Privacy, NeurIPS 2020, with one step less).
    It is exact: where floating point cannot tell on which side of a chance a random number lies, once in some 10⁹
    attempts, both are computed to eighty digits."""
    u, v, keep, sign = words(4 * attempts).reshape(4, attempts)
    even = u < (2**64 // deviation) * deviation  # or small numbers would come more often
    offset, chance = (u % np.uint64(deviation)).astype(np.int64), (keep + 0.5) * 2.0**-64
    depth = -np.log((v + 0.5) * 2.0**-64)
    level = np.floor(depth).astype(np.int64)
    for row in np.flatnonzero((abs(depth - depth.round()) < UNSURE) | (v < 1 / UNSURE)):
        level[row] = math.floor(-_precise(v[row], words(3)).ln(PRECISE))
    size = offset + deviation * level
    gamma = (size / deviation) ** 2 / 2 - level + 0.5
    accepted = chance < np.exp(-gamma)
    for row in np.flatnonzero(abs(chance - np.exp(-gamma)) < UNSURE):
        k, square = int(size[row]), 2 * deviation**2
        exact = PRECISE.divide(Decimal((2 * int(level[row]) - 1) * deviation**2 - k * k), Decimal(square))
        accepted[row] = _precise(keep[row], words(3)) < exact.exp(PRECISE)
    negative = (sign & np.uint64(1)).astype(bool)
    accepted &= even & ~(negative & (size == 0))  # zero has one sign
    signed: NDArray[np.int64] = np.where(negative, -size, size)[accepted]
    return signed


def _precise(first: np.uint64, others: Words) -> Decimal:
    """The uniform number in (0, 1) that begins with the bits of `first`."""
    bits = 0
    for word in (first, *others):
        bits = bits << 64 | int(word)
    return PRECISE.divide(Decimal(2 * bits + 1), Decimal(2 ** (64 * (1 + len(others)) + 1)))


def _box_muller_(out: Tensor, start: int, u: Tensor, v: Tensor) -> None:
    """Write the normal pairs of uniform draws u, v [n, pairs] to out[:, start:], the last one perhaps cut in half."""
    radius, angle = torch.sqrt(-2.0 * torch.log1p(-u)), 2.0 * math.pi * v
    target = out[:, start : start + 2 * u.shape[1]]
    target[:, 0::2] = radius * torch.cos(angle)
    target[:, 1::2] = (radius * torch.sin(angle))[:, : target.shape[1] // 2]
