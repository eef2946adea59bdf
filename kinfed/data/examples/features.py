"""The inputs of a data set, in memory once: raw as stored, cast and standardized per batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from kinfed.core import storage
from kinfed.data.examples.packing import Packing
from kinfed.errors import DataError


@dataclass(repr=False)
class Features:
    """`raw` [N, ...]: uint8 images, float32 tables, or int64 tokens (left as they are).

    A gathered value is (raw - mean) / std in float32; mean and std broadcast over one example. With `vectors` [V, D],
    whole numbers in raw stand for their rows: an example gathered has one axis more, and only numbers are stored.
    `packing` says how several inputs lie in raw [N, numbers], and in what is gathered."""

    raw: Tensor
    mean: Tensor | None = None
    std: Tensor | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    vectors: Tensor | None = None
    packing: Packing | None = None

    def __repr__(self) -> str:
        return f"<Features of {len(self.raw):,} examples of {self.shape_in_words}, {self.raw.dtype}>"

    def __post_init__(self) -> None:
        if self.vectors is not None:
            self._check_vectors(self.vectors)
        for name, value in (("mean", self.mean), ("std", self.std)):
            if value is not None and not _broadcasts(value, self.shape):
                raise DataError(f"{name} of shape {tuple(value.shape)} does not fit examples of shape {self.shape}")
        if self.std is not None and not bool((self.std > 0).all()):
            raise DataError("std must be positive everywhere; give constant features a std of 1")
        self._shift = None if self.mean is None else self.mean.to(self.device, torch.float32)
        self._scale = None if self.std is None else (1.0 / self.std.to(torch.float32)).to(self.device)
        self._vectors = None if self.vectors is None else self.vectors.to(self.device)
        self._standardization: tuple[np.ndarray, np.ndarray] | None = None  # once it was asked for

    def _check_vectors(self, vectors: Tensor) -> None:
        if vectors.dim() != 2 or vectors.dtype != torch.float32 or not bool(torch.isfinite(vectors).all()):
            raise DataError(f"vectors should be finite float32 [V, D]; got {vectors.dtype} {tuple(vectors.shape)}")
        if self.raw.dtype not in (torch.int32, torch.int64) or self.mean is not None or self.std is not None:
            raise DataError(f"numbers of vectors are int32 or int64 without mean and std; got {self.raw.dtype}")
        if self.raw.numel() and not 0 <= int(self.raw.min()) <= int(self.raw.max()) < len(vectors):
            span = f"{int(self.raw.min())}..{int(self.raw.max())}"
            raise DataError(f"examples name vectors 0..{len(vectors) - 1}; found {span}")

    def check_finite(self) -> None:
        """Refuse examples that would make every model NaN."""
        if not self.raw.is_floating_point() or not len(self.raw):
            return
        bad = ~torch.isfinite(self.raw.reshape(len(self.raw), -1)).all(1)
        if bool(bad.any()):
            which = f"(first: row {int(bad.nonzero()[0])})"
            raise DataError(f"{int(bad.sum())} example(s) hold NaN or infinite features {which}; clean or drop them")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return (*self.raw.shape[1:], *(() if self.vectors is None else self.vectors.shape[1:]))

    @property
    def shape_in_words(self) -> str:
        """Shape of one example, or of its inputs."""
        return f"shape {list(self.shape)}" if self.packing is None else self.packing.in_words()

    @property
    def is_tokens(self) -> bool:
        return self.raw.dtype == torch.int64 and self.vectors is None

    @property
    def example_bytes(self) -> int:
        """Bytes of one example once gathered."""
        return (8 if self.is_tokens else 4) * (prod(self.shape) if len(self.raw) else 1)

    def __len__(self) -> int:
        return int(self.raw.shape[0])

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def places(self, index: Tensor) -> Tensor:
        """Numbers of examples, where the raw array lies: who reads several things at them moves them once."""
        return index.to(self.raw.device)

    def rows(self, index: Tensor) -> Tensor:
        """Raw examples at `index` [n]; a copy."""
        return self.raw.index_select(0, self.places(index))

    def gather(
        self, index: Tensor, change: Callable[[Tensor], Tensor] | None = None, into: Tensor | None = None
    ) -> Tensor:
        """Examples at `index` (any shape) as float32 [index.shape, ...] on the device.

        `change` maps the raw examples, [index.numel(), ...], to others of the same shape before all else. `into` is
        memory of the result's shape and type that it may be written to."""
        flat = self.rows(index.reshape(-1))
        if change is not None:
            flat = change(flat)
        if self._vectors is not None:
            numbers = self.to_device(flat).reshape(-1)
            place = None if into is None else into.view(-1, self._vectors.shape[1])
            return torch.index_select(self._vectors, 0, numbers, out=place).reshape(*index.shape, *self.shape)
        x = self.to_device(flat).reshape(*index.shape, *self.shape)
        if self.is_tokens:
            return x
        if x.dtype != torch.float32:
            x = x.to(torch.float32) if into is None else into.copy_(x)
        if self._shift is not None:  # subtracted first: exact where values are close to their mean
            x = x.sub_(self._shift)
        if self._scale is not None:
            x = x.mul_(self._scale)
        return x

    def standardization(self) -> tuple[np.ndarray, np.ndarray]:
        """(mean, 1 / std), float32 [numbers of an example] each: a gathered value is (raw - mean) * that."""
        if self._standardization is None:
            zero, one = torch.zeros(self.shape), torch.ones(self.shape)
            mean = zero if self._shift is None else self._shift.cpu().expand(self.shape)
            factor = one if self._scale is None else self._scale.cpu().expand(self.shape)
            # One number for all, expanded, would be read by slower code than numbers that lie side by side.
            self._standardization = mean.flatten().contiguous().numpy(), factor.flatten().contiguous().numpy()
        return self._standardization

    def on(self, device: torch.device, *, resident: bool = False) -> Features:
        """The same features, gathered to another device. The raw array stays where it is; with `resident` it lies on
        the device, too, and of a batch nothing but the numbers of its examples is copied."""
        return replace(self, raw=self.raw.to(device) if resident else self.raw, device=device)

    def standardized(self, rows: Tensor) -> Features:
        """Every feature shifted and scaled to mean 0 and variance 1 over `rows`; a constant one is only shifted."""
        total = torch.zeros(self.shape, dtype=torch.float64)
        # Two passes in float64: the one-pass formula cancels for features far from zero (years, prices).
        for part in torch.split(rows, 8192):
            total += self.raw[part].to(torch.float64).sum(0)
        mean = total / max(len(rows), 1)
        square = torch.zeros_like(total)
        for part in torch.split(rows, 8192):
            square += (self.raw[part].to(torch.float64) - mean).square().sum(0)
        std = spread(mean, square, len(rows))
        for one, place in () if self.packing is None else self.packing.places:
            if one.kind != "float":  # names of things, which have no scale
                mean[place], std[place] = 0, 1
        return replace(self, mean=mean.to(torch.float32), std=std.to(torch.float32))


def spread(mean: Tensor, square: Tensor, rows: int) -> Tensor:
    """The deviation of every feature, from its mean and its sum of squared distances from it; 1 for a constant one."""
    std = (square / max(rows, 1)).sqrt()
    return torch.where(std <= 1e-12 * mean.abs().clamp_min(1e-300), 1.0, std)


def fingerprint(features: Features, labels: Tensor) -> str:
    """Tells one set of examples from another, however they are standardized."""
    return _checksum(raw=features.raw, labels=labels, vectors=features.vectors)


def features_digest(features: Features) -> str:
    """Tells one set of examples as models see them from another."""
    return _checksum(raw=features.raw, mean=features.mean, std=features.std, vectors=features.vectors)


def _checksum(**tensors: Tensor | None) -> str:
    return storage.checksum({name: tensor for name, tensor in tensors.items() if tensor is not None})


def _broadcasts(value: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether value op x has x's shape, for x of this shape."""
    pairs = zip(reversed(value.shape), reversed(shape), strict=False)
    return value.dim() <= len(shape) and all(size in (1, wanted) for size, wanted in pairs)
