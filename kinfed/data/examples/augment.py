"""Random changes of training images: crops and mirror images. Never applied to validation or test examples.

    crop       4 black pixels are added on every side, and an image of the old size is cut out at a random position
    flip       every second image is mirrored, left to right
    crop_flip  both

The changes happen to raw pixels, before these are standardized, so that the border is black, not gray. They are a
function of (seed, stream, round, client, step, place in the batch), like the batches themselves: all methods of a
seed see the same changed images, in any chunk and on any pool. Option `augment` of the local work.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.errors import ConfigError, unknown_name


@dataclass(frozen=True)
class Augmentation:
    pad: int  # pixels added on every side before cutting out; 0: no cutting
    mirror: bool

    def __call__(self, raw: Tensor, draw: Tensor) -> Tensor:
        """raw [N, channels, height, width] changed by 64 random bits each, draw [N] int64; `raw` is left as it was."""
        draw = draw.to(raw.device)
        if self.pad:
            height, width = raw.shape[2:]
            padded = torch.nn.functional.pad(raw, (self.pad,) * 4)
            places = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view [N, c, y, x, height, width]
            sides = 2 * self.pad + 1
            raw = places[torch.arange(len(raw), device=raw.device), :, _below(draw, sides), _below(draw >> 20, sides)]
        if self.mirror:
            mirrored = ((draw >> 40) & 1).to(torch.bool)
            raw = torch.where(mirrored[:, None, None, None], raw.flip(-1), raw)
        return raw


AUGMENTATIONS: Mapping[str, Augmentation] = MappingProxyType(
    {"crop": Augmentation(4, False), "flip": Augmentation(0, True), "crop_flip": Augmentation(4, True)}
)


def augmentation(name: str, shape: tuple[int, ...]) -> Augmentation:
    """The augmentation of that name for examples of this shape."""
    if name not in AUGMENTATIONS:
        raise unknown_name("augmentation", name, AUGMENTATIONS)
    if len(shape) != 3:
        raise ConfigError(
            f"augment = {name} changes images [channels, height, width]; examples here have the shape {list(shape)}; "
            "leave augment out"
        )
    return AUGMENTATIONS[name]


def draws(seed: int, stream: str, round: int, ids: Tensor, steps: Tensor, width: int) -> Tensor:
    """[S, n, width] int64: the bits that change each example of each client's batch, for steps [S]."""
    key = rng.fold(rng.root(seed, "augment-" + stream), round, ids)
    return rng.bits(rng.fold(key, steps[:, None]), width)


def _below(draw: Tensor, count: int) -> Tensor:
    """A number in 0..count-1 from the lowest 20 bits."""
    return ((draw & 0xFFFFF) * count) >> 20
