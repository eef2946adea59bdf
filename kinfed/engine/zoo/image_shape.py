"""What models for images ask of their examples."""

from __future__ import annotations

from kinfed.errors import ModelError


def image_shape(name: str, shape: tuple[int, ...], side: int) -> tuple[int, int, int]:
    """(channels, height, width), for a model that needs images of at least `side` pixels each way."""
    if len(shape) != 3 or min(shape[1:]) < side:
        raise ModelError(
            f"model {name} needs images [channels, height, width] of at least {side}x{side}; "
            f"got examples of shape {list(shape)}; use mlr or mlp for tables"
        )
    return shape[0], shape[1], shape[2]
