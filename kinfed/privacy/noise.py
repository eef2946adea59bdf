"""Sources of noise.

A source gives standard normal noise for a named gradient: `source(name [n], theta [n, P]) -> [n, P]`. A name stands for
one gradient of one client: which sample of its examples, and the index of the gradient on that sample.

In a simulation noise is a function of (seed, name) like every other draw, so runs repeat and resume bit for bit. At a
real client that would be no noise at all: whoever knows the seed can subtract it. There a `Secret` takes the place of
the seed. It has to hide two things, the noise and which examples were sampled: epsilon counts on both. And epsilon
counts on answers that are independent of each other: noise that two answers share cancels in their difference, and a
sample that they share is not hidden twice. So every answer has draws of its own.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.data import Cohort
from kinfed.errors import ConfigError

Source = Callable[[Tensor, Tensor], Tensor]

BLOCK = 1 << 15  # pairs of draws made at once: few enough to stay in cache
SECRET_BYTES = 32


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
    """A source of noise that nobody can repeat, by random bytes that are forgotten: for what leaves a server once."""
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

    def with_secret_sampling(self, data: Cohort) -> Cohort:
        """The same data with training batches sampled by this key instead of the run's seed."""
        seed = int.from_bytes(_hash(self.key, 8, "sampling"), "little", signed=True)
        return replace(data, train=replace(data.train, seed=seed))


def _hash(key: bytes, size: int, purpose: str, *parts: bytes) -> bytes:
    stream = hashlib.shake_256()
    for part in (key, purpose.encode(), *parts):
        stream.update(len(part).to_bytes(8, "little") + part)  # lengths, so that no two inputs read alike
    return stream.digest(size)


def _box_muller_(out: Tensor, start: int, u: Tensor, v: Tensor) -> None:
    """Write the normal pairs of uniform draws u, v [n, pairs] to out[:, start:], the last one perhaps cut in half."""
    radius, angle = torch.sqrt(-2.0 * torch.log1p(-u)), 2.0 * math.pi * v
    target = out[:, start : start + 2 * u.shape[1]]
    target[:, 0::2] = radius * torch.cos(angle)
    target[:, 1::2] = (radius * torch.sin(angle))[:, : target.shape[1] // 2]
