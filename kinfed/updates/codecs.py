"""Codecs: rows of numbers as fewer bytes, at the price of an error that is known.

    codec = QSGD(levels=7)
    code = codec.encode(rows, key)              # uint8 [n, codec.nbytes(d)], what is sent of rows [n, d]
    again = codec.decode(code, d)               # [n, d] float32, what arrives

QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding,
NIPS 2017, Eq. 4) divides a row into buckets and rounds every number of a bucket v at random to one of 2s + 1 values:

    Q(v_i) = ‖v‖ sign(v_i) ξ_i,   ξ_i = (l + 1)/s with the chance s |v_i|/‖v‖ − l, else l/s,   l = ⌊s |v_i|/‖v‖⌋

so that E Q(v) = v. With the 2-norm, E ‖Q(v) − v‖² ≤ min(d/s², √d/s) ‖v‖² for a bucket of d numbers. `norm = "max"`,
the default, scales by the largest number instead, as the paper's experiments do: no number moves by more than
‖v‖_∞/s. Codes have ⌈log₂(2s + 1)⌉ bits each; the paper's Elias code is shorter where most of them are zero.

Top-k (Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS 2018) sends the k largest numbers of a row as they
are; of equals those with the lowest index. Positions travel as indices or as a bit for every number, whichever is
shorter. It is not unbiased: the sender must remember what was not sent (kinfed.updates.compression).

Both ends know shapes and settings: a code has no header. Draws are counted by (key, position), so that a row's code
depends on no other row.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from kinfed.core import Registry, check_options, declared, option, pack_numbers, packed, rng, unpack_numbers, unpacked
from kinfed.errors import ConfigError

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Codec(ABC):
    """Its fields are its options."""

    unbiased: ClassVar[bool] = False  # what arrives is what was sent, on average over draws

    def __post_init__(self) -> None:
        check_options(self)

    @abstractmethod
    def nbytes(self, d: int) -> int:
        """Bytes of the code of a row of d numbers."""

    @abstractmethod
    def encode(self, rows: Tensor, key: Tensor) -> Tensor:
        """uint8 [n, nbytes(d)] of finite rows [n, d], d > 0, with a key [n] for the draws of each."""

    @abstractmethod
    def decode(self, code: Tensor, d: int) -> Tensor:
        """float32 [n, d]."""


@dataclass(frozen=True)
class QSGD(Codec):
    levels: int = option(
        7, "s: steps from zero to the norm; 2s + 1 values, so that 7 are 4 bits a number", ge=1, le=32767
    )
    bucket: int = option(512, "numbers that share a norm", ge=1)
    norm: Literal["max", "l2"] = option("max", "what numbers are divided by: the bucket's largest, or its 2-norm")

    unbiased = True

    @property
    def width(self) -> int:
        """Bits of a number."""
        return (2 * self.levels).bit_length()

    def _buckets(self, d: int) -> int:
        return -(-d // self.bucket)

    def nbytes(self, d: int) -> int:
        return FLOAT_BYTES * self._buckets(d) + -(-d * self.width // 8)

    def encode(self, rows: Tensor, key: Tensor) -> Tensor:
        n, d = rows.shape
        padded = torch.nn.functional.pad(rows, (0, self._buckets(d) * self.bucket - d)).reshape(n, -1, self.bucket)
        if self.norm == "max":
            norm = padded.abs().amax(2)
        else:
            norm = torch.linalg.vector_norm(padded, dim=2, dtype=torch.float64).to(torch.float32)
        by_number = norm.repeat_interleave(self.bucket, 1)[:, :d].to(torch.float64)
        share = rows.abs().to(torch.float64) / by_number.clamp_min(torch.finfo(torch.float32).tiny)
        # ⌊s|v|/‖v‖ + u⌋ is l + 1 with the chance s|v|/‖v‖ − l.
        level = (share * self.levels + rng.uniform(key, d)).floor().clamp_max(self.levels)
        symbol = (level * rows.sign()).to(torch.int64) + self.levels
        return torch.cat([as_bytes(norm), pack_numbers(symbol, self.width)], 1)

    def decode(self, code: Tensor, d: int) -> Tensor:
        norms = FLOAT_BYTES * self._buckets(d)
        norm = as_floats(code[:, :norms]).repeat_interleave(self.bucket, 1)[:, :d]
        level = unpack_numbers(code[:, norms:], d, self.width) - self.levels
        return norm * (level.to(torch.float64) / self.levels).to(torch.float32)


@dataclass(frozen=True)
class TopK(Codec):
    share: float = option(
        0.01, "of the numbers of a row, at least one, that is sent: those of largest size", gt=0, le=1
    )

    def count(self, d: int) -> int:
        """k of d numbers."""
        return max(1, math.ceil(self.share * d - 1e-9))  # 0.07 * 100 is 7.000000000000001

    def nbytes(self, d: int) -> int:
        k = self.count(d)
        return FLOAT_BYTES * k + (0 if k == d else min(self._index_bytes(d), -(-d // 8)))

    def _index_bytes(self, d: int) -> int:
        return -(-self.count(d) * (d - 1).bit_length() // 8)

    def _sends_indices(self, d: int) -> bool:
        return self._index_bytes(d) < -(-d // 8)

    def encode(self, rows: Tensor, key: Tensor) -> Tensor:
        n, d = rows.shape
        k = self.count(d)
        if k == d:
            return as_bytes(rows)
        mask = largest(rows.abs(), k)
        index = mask.nonzero()[:, 1].reshape(n, k)
        where = pack_numbers(index, (d - 1).bit_length()) if self._sends_indices(d) else packed(mask)
        return torch.cat([as_bytes(rows.gather(1, index)), where], 1)

    def decode(self, code: Tensor, d: int) -> Tensor:
        k = self.count(d)
        values = as_floats(code[:, : FLOAT_BYTES * k])
        if k == d:
            return values
        where = code[:, FLOAT_BYTES * k :]
        if self._sends_indices(d):
            index = unpack_numbers(where, k, (d - 1).bit_length())
        else:
            index = unpacked(where, d).nonzero()[:, 1].reshape(len(code), k)
        return values.new_zeros(len(code), d).scatter_(1, index, values)


def largest(size: Tensor, k: int) -> Tensor:
    """bool [n, d]: the k largest of every row; of equals those with the lowest index."""
    smallest = size.topk(k, 1).values[:, -1:]
    above = size > smallest
    equal = size == smallest
    room = k - above.sum(1, keepdim=True)
    return above | (equal & (equal.cumsum(1) <= room))


def as_bytes(rows: Tensor) -> Tensor:
    """uint8 [n, 4 d] of float32 [n, d], little-endian."""
    array = np.ascontiguousarray(rows.detach().cpu().numpy(), "<f4")
    return torch.from_numpy(array.view(np.uint8).reshape(len(rows), -1).copy())


def as_floats(code: Tensor) -> Tensor:
    """float32 [n, d] of uint8 [n, 4 d]."""
    return torch.from_numpy(np.ascontiguousarray(code.numpy()).view("<f4").astype(np.float32))


CODECS: Registry[type[Codec]] = Registry("codec")
CODECS.register(
    "qsgd", QSGD, title="QSGD", summary="rounds every number at random to one of 2s + 1 levels; unbiased",
    reference="Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD: Communication-Efficient SGD via Gradient Quantization "
    "and Encoding, NIPS 2017",
)  # fmt: skip
CODECS.register(
    "topk", TopK, title="Top-k", summary="sends the largest numbers of a message and remembers the others",
    reference="Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS 2018",
)  # fmt: skip


def first_option(name: str) -> str:
    """The option of a codec that a short form gives, as qsgd:4 does its levels."""
    options = list(declared(CODECS[name].options))
    if not options:
        raise ConfigError(f"codec {name} has no options; write {name} alone")
    return options[0]
