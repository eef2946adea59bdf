"""Spectrograms, filters, rooms and mixtures against formulas by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kinfed.core import rng
from kinfed_papers.data import audio
from kinfed_papers.data.audio import Spectrogram, mel_filters

RATE = 8000


def tone(hertz: float, seconds: float = 1.0, loud: float = 0.1) -> torch.Tensor:
    return (loud * torch.sin(2 * math.pi * hertz * torch.arange(int(RATE * seconds)) / RATE))[None]


def test_the_mel_scale():
    assert audio.hertz_to_mel(1000) == pytest.approx(1000, abs=0.1)
    assert audio.hertz_to_mel(0) == 0
    for hertz in (60.0, 440.0, 3800.0):
        assert audio.mel_to_hertz(audio.hertz_to_mel(hertz)) == pytest.approx(hertz)


def test_mel_filters_are_triangles_between_edges_of_equal_mel():
    """Two filters from 0 to 4000 Hz: edges at 0, 1, 2 and 3 thirds of 2146.06 mel."""
    filters = mel_filters(2, 16, RATE, 0, 4000)  # bins every 500 Hz
    third = 2595 * math.log10(1 + 4000 / 700) / 3
    e1, e2 = (700 * (10 ** (k * third / 2595) - 1) for k in (1, 2))  # 620.6 and 1791.4 Hz
    assert filters.shape == (2, 9)
    by_hand = [
        [0, 500 / e1, (e2 - 1000) / (e2 - e1), (e2 - 1500) / (e2 - e1), 0, 0, 0, 0, 0],
        [0, 0, (1000 - e1) / (e2 - e1), (1500 - e1) / (e2 - e1),
         *((4000 - f) / (4000 - e2) for f in (2000, 2500, 3000, 3500, 4000))],
    ]  # fmt: skip
    torch.testing.assert_close(filters, torch.tensor(by_hand), atol=1e-5, rtol=1e-5)


@given(st.integers(16, 64))
@settings(max_examples=15)
def test_between_the_outer_peaks_neighbours_add_up_to_one(mels: int):
    filters = mel_filters(mels, 512, RATE, 60, 3800)
    assert bool((filters.sum(1) > 0).all())  # none is empty
    edges = torch.linspace(audio.hertz_to_mel(60), audio.hertz_to_mel(3800), mels + 2)
    bins = torch.arange(257) * RATE / 512
    inside = (bins >= audio.mel_to_hertz(float(edges[1]))) & (bins <= audio.mel_to_hertz(float(edges[-2])))
    torch.testing.assert_close(filters.sum(0)[inside], torch.ones(int(inside.sum())), atol=1e-4, rtol=0)


def test_power_is_that_of_a_plain_fourier_transform():
    wave = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 800)).astype(np.float32))
    picture = Spectrogram(RATE, 20)
    found = picture.decibels(wave)
    assert found.shape == (2, 20, 6)  # a frame every 160 samples, both ends included
    # frame 2 is centred on sample 320; its 200 samples begin at 320 - 100
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(200) / 200)
    power = np.abs(np.fft.rfft(wave[1, 220:420].numpy() * window, 512)) ** 2
    expected = 10 * np.log10(mel_filters(20, 512, RATE, 60, 3800).numpy() @ power)
    np.testing.assert_allclose(found[1, :, 2].numpy(), expected, atol=1e-3)


def test_a_tone_lights_up_its_own_band_and_ten_times_the_wave_is_20_decibels():
    picture = Spectrogram(RATE, 40)
    edges = torch.linspace(audio.hertz_to_mel(60), audio.hertz_to_mel(3800), 42)
    quiet, loud = picture.decibels(tone(1000)), picture.decibels(tone(1000, loud=1.0))
    band = int(quiet[0, :, 25].argmax())
    assert float(edges[band]) <= audio.hertz_to_mel(1000) <= float(edges[band + 2])
    assert float(loud[0, band, 25] - quiet[0, band, 25]) == pytest.approx(20, abs=1e-3)


def test_bytes_are_decibels_in_steps_of_point_four():
    picture = Spectrogram(RATE, 40)
    raw = picture.bytes(tone(1000))
    assert raw.shape == (1, 1, 40, 51)
    assert raw.dtype == torch.uint8
    decibels = picture.decibels(tone(1000)).clamp(audio.FLOOR_DB, audio.CEILING_DB)
    torch.testing.assert_close(raw[:, 0].float() / 255 * 100 - 80, decibels, atol=0.2, rtol=0)
    assert int(picture.bytes(torch.zeros(1, 8000)).max()) == 0  # silence is the floor


def test_convolution_is_numpys():
    numbers = np.random.default_rng(1)
    waves, filters = numbers.normal(size=(3, 50)).astype(np.float32), numbers.normal(size=(3, 7)).astype(np.float32)
    found = audio.convolved(torch.from_numpy(waves), torch.from_numpy(filters))
    expected = np.stack([np.convolve(w, f)[:50] for w, f in zip(waves, filters, strict=True)])
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_a_microphone_passes_what_it_says():
    response = ((200.0, 0.0), (1000.0, -20.0), (2000.0, 6.0), (3500.0, 0.0))
    taps = audio.microphone(response, RATE)
    torch.testing.assert_close(taps, taps.flip(0))  # linear phase
    gain = torch.fft.rfft(taps, RATE).abs()  # one bin per Hz
    for hertz, decibels in ((2000, 6.0), (3500, 0.0), (100, 0.0)):
        assert 20 * math.log10(float(gain[hertz])) == pytest.approx(decibels, abs=1.0)
    assert 20 * math.log10(float(gain[1000])) < -12  # the bottom of a notch is rounded off


def test_a_room_rings_as_long_and_as_loud_as_told():
    response = audio.room(rng.root(0, "test"), RATE, seconds=0.3, wet=0.5)
    assert response.shape == (4000,)
    assert float(response[0]) == 1.0
    assert float(response[1:].square().sum()) == pytest.approx(0.5, rel=1e-4)
    early, late = response[100:500].square().mean(), response[1300:1700].square().mean()
    # 1,200 samples are 0.15 s, half of what 60 dB take
    assert 10 * math.log10(float(early / late)) == pytest.approx(30, abs=2)
    assert torch.equal(response, audio.room(rng.root(0, "test"), RATE, 0.3, 0.5))


def test_shifting_fills_with_silence():
    waves = torch.arange(1.0, 6.0).repeat(3, 1)
    found = audio.shifted(waves, torch.tensor([0, 2, -3]))
    assert found.tolist() == [[1, 2, 3, 4, 5], [0, 0, 1, 2, 3], [4, 5, 0, 0, 0]]


def test_mixtures_have_the_ratio_asked_for():
    waves, others = tone(500), tone(900, loud=3.0)
    found = audio.mixed(waves, others, torch.tensor([7.0]))
    ratio = audio.loudness(waves) / audio.loudness(found - waves)
    assert 20 * math.log10(float(ratio)) == pytest.approx(7.0, abs=1e-3)
    silent = audio.mixed(torch.zeros(1, 100), torch.zeros(1, 100), torch.tensor([0.0]))
    assert torch.equal(silent, torch.zeros(1, 100))


def test_music_and_alarms_depend_on_their_key_alone():
    keys = rng.fold(rng.root(0, "sounds"), torch.arange(4))
    for make in (audio.music, audio.alarm):
        together = make(keys, 2000, RATE)
        assert bool(torch.isfinite(together).all())
        assert bool((audio.loudness(together) > 0.01).all())
        torch.testing.assert_close(make(keys[2:3], 2000, RATE)[0], together[2])
        assert not torch.allclose(together[0], together[1])


def test_an_alarm_is_off_half_of_the_time():
    found = audio.alarm(rng.fold(rng.root(0, "alarm"), torch.arange(3)), RATE, RATE)
    assert float((found == 0).float().mean()) == pytest.approx(0.5, abs=0.02)
