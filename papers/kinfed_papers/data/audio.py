"""Sound as pictures: log-mel spectrograms, and what a microphone, a room and other sounds do to a recording.

Waves are float tensors [n, samples]. A spectrogram's values are decibels, kept as bytes: 0 is FLOOR_DB and below, 255
is CEILING_DB and above, so that one step is 0.4 dB, less than anyone hears.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kinfed.core import rng

FLOOR_DB, CEILING_DB = -80.0, 20.0


def hertz_to_mel(hertz: float) -> float:
    """2595 log10(1 + f / 700): equal steps sound equally far apart; 1000 Hz is 1000 mel."""
    return 2595.0 * math.log10(1.0 + hertz / 700.0)


def mel_to_hertz(mel: float) -> float:
    return 700.0 * (math.pow(10.0, mel / 2595.0) - 1.0)


def mel_filters(mels: int, fft: int, rate: int, low: float, high: float) -> Tensor:
    """[mels, fft // 2 + 1] triangles: filter k rises from edge k to edge k + 1 and falls to edge k + 2, where the
    mels + 2 edges are equally far apart on the mel scale; its peak is 1."""
    first, last = hertz_to_mel(low), hertz_to_mel(high)
    edges = [mel_to_hertz(first + (last - first) * k / (mels + 1)) for k in range(mels + 2)]
    bins = torch.arange(fft // 2 + 1, dtype=torch.float64) * rate / fft
    edge = torch.tensor(edges, dtype=torch.float64)[:, None]
    rising = (bins - edge[:-2]) / (edge[1:-1] - edge[:-2])
    falling = (edge[2:] - bins) / (edge[2:] - edge[1:-1])
    return torch.minimum(rising, falling).clamp_min(0).to(torch.float32)


@dataclass(frozen=True)
class Spectrogram:
    rate: int = 8000
    mels: int = 40
    window_seconds: float = 0.025
    hop_seconds: float = 0.02
    fft: int = 512
    low: float = 60.0
    high: float = 3800.0

    def decibels(self, waves: Tensor) -> Tensor:
        """[n, mels, frames]; a frame every hop, the first and last centred on the ends of the wave."""
        length = round(self.window_seconds * self.rate)
        spectrum = torch.stft(
            waves, self.fft, round(self.hop_seconds * self.rate), length, torch.hann_window(length),
            center=True, pad_mode="constant", return_complex=True,
        )  # fmt: skip
        power = spectrum.real.square() + spectrum.imag.square()
        filters = mel_filters(self.mels, self.fft, self.rate, self.low, self.high)
        return 10.0 * torch.log10((filters @ power).clamp_min(1e-12))

    def bytes(self, waves: Tensor) -> Tensor:
        """uint8 [n, 1, mels, frames]."""
        share = (self.decibels(waves) - FLOOR_DB) / (CEILING_DB - FLOOR_DB)
        return (share.clamp(0, 1) * 255).round().to(torch.uint8)[:, None]


def convolved(waves: Tensor, filters: Tensor) -> Tensor:
    """Waves [n, S] through filters [n or 1, F]: the first S samples of the full convolution."""
    from scipy.fft import next_fast_len

    samples = waves.shape[1]
    size = next_fast_len(samples + filters.shape[1] - 1, real=True)
    product = torch.fft.rfft(waves, size) * torch.fft.rfft(filters, size)
    out: Tensor = torch.fft.irfft(product, size)
    return out[:, :samples]


def microphone(response: tuple[tuple[float, float], ...], rate: int, taps: int = 65) -> Tensor:
    """[taps] linear-phase filter with a gain in dB at given frequencies in Hz, straight lines of gain between them,
    constant outside."""
    from scipy.signal import firwin2

    frequencies = [0.0, *(f for f, _ in response), rate / 2]
    gains = [10 ** (db / 20) for db in (response[0][1], *(db for _, db in response), response[-1][1])]
    return torch.from_numpy(np.asarray(firwin2(taps, frequencies, gains, fs=rate), dtype=np.float32))


def room(key: Tensor, rate: int, seconds: float, wet: float, length: float = 0.5) -> Tensor:
    """[length * rate] impulse response: the direct sound, then noise that decays by 60 dB in `seconds`, with `wet`
    times the energy of the direct sound."""
    samples = round(length * rate)
    decay = 10.0 ** (-3.0 * torch.arange(samples, dtype=torch.float64) / (rate * seconds))
    tail = rng.normal(key, samples) * decay
    tail[0] = 0.0
    tail *= math.sqrt(wet) / tail.square().sum().sqrt()
    tail[0] = 1.0
    return tail.to(torch.float32)


def shifted(waves: Tensor, by: Tensor) -> Tensor:
    """Every wave later by [n] samples (earlier where negative), zeros where nothing was."""
    place = torch.arange(waves.shape[1]) - by[:, None]
    inside = (place >= 0) & (place < waves.shape[1])
    return waves.gather(1, place.clamp(0, waves.shape[1] - 1)) * inside


def loudness(waves: Tensor) -> Tensor:
    """[n, 1] root of the mean square, never zero."""
    return waves.square().mean(1, keepdim=True).sqrt().clamp_min(1e-6)


def mixed(waves: Tensor, others: Tensor, decibels: Tensor) -> Tensor:
    """waves + others, with the waves [n] decibels louder than the others."""
    gain = loudness(waves) / loudness(others) * 10.0 ** (-decibels[:, None] / 20)
    return waves + gain * others


def music(key: Tensor, samples: int, rate: int) -> Tensor:
    """[n, samples]: for every key four chords of three notes with harmonics, each fading from its beginning."""
    u = rng.uniform(key, 1 + 4 * 3).to(torch.float32)
    time = torch.arange(samples) / rate
    root = 110.0 * 2.0 ** (torch.floor(12 * u[:, 0]) / 12)
    note = torch.floor(24 * u[:, 1:].reshape(-1, 4, 3))  # semitones above the root
    beat = (time * 4 / (samples / rate)).long().clamp_max(3)
    since = time - beat * (samples / rate / 4)
    out = torch.zeros(len(key), samples)
    for voice in range(3):
        pitch = root[:, None] * 2.0 ** (note[:, beat, voice] / 12)
        for harmonic in (1, 2, 3):
            out += torch.sin(2 * math.pi * harmonic * pitch * time) / harmonic
    return out * torch.exp(-3.0 * since)


def alarm(key: Tensor, samples: int, rate: int) -> Tensor:
    """[n, samples]: beeps of two alternating pitches, on and off five times a second, with a third harmonic."""
    u = rng.uniform(key, 2).to(torch.float32)
    time = torch.arange(samples) / rate + u[:, :1]  # begins anywhere in the pattern
    step = (10 * time).long()
    pitch = torch.where(step % 4 < 2, 1.0, 1.25) * (800 + 400 * u[:, 1:])
    tone = torch.sin(2 * math.pi * pitch * time) + torch.sin(6 * math.pi * pitch * time) / 3
    return tone * (step % 2 == 0)
