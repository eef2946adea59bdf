"""The inputs of a data set, held once: raw as stored, cast and standardized per batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Features:
    """`raw` [N, ...]: uint8 images, float32 tables, or int64 tokens (left as they are).

    A gathered value is (raw - mean) / std in float32; mean and std broadcast over one example."""

    raw: Tensor
    mean: Tensor | None = None
    std: Tensor | None = None
    device: torch.device = torch.device("cpu")

    def __post_init__(self) -> None:
        self._scale = None if self.std is None else (1.0 / self.std.to(torch.float32))
        shift = None if self.mean is None else self.mean.to(torch.float32)
        if shift is not None and self._scale is not None:
            shift = shift * self._scale
        self._shift = shift

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return tuple(self.raw.shape[1:])

    @property
    def is_tokens(self) -> bool:
        return self.raw.dtype == torch.int64

    @property
    def example_bytes(self) -> int:
        """Bytes of one example once gathered."""
        return (8 if self.is_tokens else 4) * (self.raw[0].numel() if len(self.raw) else 1)

    def __len__(self) -> int:
        return int(self.raw.shape[0])

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def gather(self, index: Tensor) -> Tensor:
        """Examples at `index` (any shape) as float32 [index.shape, ...] on the device."""
        flat = self.raw.index_select(0, index.reshape(-1))
        x = self.to_device(flat).reshape(*index.shape, *self.shape)
        if self.is_tokens:
            return x
        if x.dtype != torch.float32:
            x = x.to(torch.float32)
        if self._scale is not None:
            x = x.mul_(self._scale.to(x.device))
        if self._shift is not None:
            x = x.sub_(self._shift.to(x.device))
        return x

    def on(self, device: torch.device) -> Features:
        """The same features, gathered to another device; the raw array stays where it is."""
        return Features(self.raw, self.mean, self.std, device)
