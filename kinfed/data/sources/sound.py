"""Encoded sound (FLAC, WAV, OGG, ...) to samples. Needs the extra `audio`."""

from __future__ import annotations

import io

import numpy as np
import soundfile
from numpy.typing import NDArray


def decode(encoded: bytes) -> tuple[NDArray[np.float32], int]:
    """Samples of the first channel in [-1, 1], and how many there are in a second; ValueError for what is no sound."""
    try:
        samples, rate = soundfile.read(io.BytesIO(encoded), dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise ValueError(str(error)) from error
    return np.ascontiguousarray(samples[:, 0]), int(rate)
