"""Spoken words, one second each: Speech Commands in the layout of the hub, a subset of it, or a synthesizer's.

    speech_commands            google/speech_commands v0.01 (64,727 clips); fetched where it is missing
    speech_commands_8k_subset  the same columns and `keyword`, `official_split`: fewer speakers, 8 kHz
    espeak                     spoken by espeak-ng in many voices, for lack of recordings

Test clips are those of the official validation and test speakers, who are in no training data; of a synthesizer's
voices every sixth one.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import wave
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kinfed.data.sources import encoded_values, hub
from kinfed.errors import DataError

Speech = Literal["auto", "speech_commands", "speech_commands_8k_subset", "espeak"]
RATE = 8000

# The labels of google/speech_commands v0.01 by number; the last one is noise.
WORDS = (
    "yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go", "zero", "one", "two", "three", "four",
    "five", "six", "seven", "eight", "nine", "bed", "bird", "cat", "dog", "happy", "house", "marvin", "sheila", "tree",
    "wow", "_silence_",
)  # fmt: skip
_SPOKEN = WORDS[:6] + WORDS[8:16]
_ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-029", "en-gb-x-rp", "en-gb-x-gbclan")
_VARIANTS = ("m1", "m3", "m5", "m7", "f1", "f2", "f3", "f4")
_SPEEDS = (130, 155, 180)  # words per minute

_RECORDED: dict[str, tuple[hub.ParquetSet, str]] = {
    "speech_commands": (
        hub.ParquetSet(
            "speech_commands", ("train", "validation", "test"), "google/speech_commands",
            "or choose speech=espeak or speech=speech_commands_8k_subset", within="v0.01",
        ),
        "Speech Commands v0.01",
    ),
    "speech_commands_8k_subset": (
        hub.ParquetSet("speech_commands_8k_subset", ("train",)),
        "a subset of Speech Commands v0.01 (15 words, 60 speakers)",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Clips:
    waves: Tensor  # [N, RATE] int16, one second each
    words: list[str]
    is_test: Tensor  # [N] bool

    def __post_init__(self) -> None:
        for test, which in ((True, "test"), (False, "training")):
            if not bool((self.is_test == test).any()):
                raise DataError(f"the clips hold none of {which} speakers; they need both")


@dataclass(frozen=True)
class Recordings:
    """Sources of clips, known before they are decoded."""

    name: str
    title: str  # for a reader of results
    files: tuple[Path, ...]

    def clips(self) -> Clips:
        return _synthesized() if self.name == "espeak" else _recorded(self.files)


def find(speech: Speech, data_dir: Path | None) -> Recordings:
    """The clips asked for; auto: the whole data set if it is there, else the subset, else a synthesizer."""
    if speech == "auto":
        folder = hub.data_folder(data_dir)
        recorded = [name for name, (wanted, _) in _RECORDED.items() if any((folder / wanted.folder).rglob("*.parquet"))]
        if not recorded and _synthesizer() is None:
            raise DataError(
                f"there is no speech in {folder}: put Speech Commands there (speech=speech_commands fetches it from "
                "the hub), or install espeak-ng, which speaks in its place (apt or brew install espeak-ng)"
            )
        return find(recorded[0] if recorded else "espeak", data_dir)  # type: ignore[arg-type]
    if speech == "espeak":
        return Recordings("espeak", "synthetic speech (espeak-ng), not recordings of people", ())
    wanted, title = _RECORDED[speech]
    splits = hub.obtain(wanted, data_dir)
    return Recordings(speech, title, tuple(file for files in splits.values() for file in files))


def one_second(samples: NDArray[Any], rate: int) -> NDArray[np.int16]:
    """[RATE] samples: resampled, cut behind or filled with silence, in 16 bits."""
    if rate != RATE:
        from scipy.signal import resample_poly

        common = int(np.gcd(rate, RATE))
        samples = resample_poly(samples, RATE // common, rate // common)
    out = np.zeros(RATE, np.float64)
    out[: min(len(samples), RATE)] = samples[:RATE]
    return np.round(np.clip(out, -1, 1) * 32767).astype(np.int16)


def _recorded(files: tuple[Path, ...]) -> Clips:
    decode = _decoder()
    waves, words, is_test = [], [], []
    for file in files:
        table = hub.read_parquet(file)
        for row in _rows(table, file):
            if row["word"] == "_silence_":
                continue
            try:
                waves.append(one_second(*decode(row["sound"])))
            except (ValueError, TypeError) as error:
                raise DataError(f"{file}, row {row['number']}: cannot decode the clip: {error}") from error
            words.append(row["word"])
            is_test.append(row["is_test"])
    return Clips(torch.from_numpy(np.stack(waves)), words, torch.tensor(is_test))


def _decoder() -> Callable[[bytes], tuple[NDArray[np.float32], int]]:
    """A function from encoded sound (FLAC, WAV, OGG, ...) to the samples of its first channel in [-1, 1] and how many
    there are in a second. It raises ValueError for what is no sound."""
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise DataError(f"decoding sound needs the extra audio: pip install 'kinfed[audio]' ({error})") from error

    def decode(encoded: bytes) -> tuple[NDArray[np.float32], int]:
        try:
            samples, rate = soundfile.read(io.BytesIO(encoded), dtype="float32", always_2d=True)
        except soundfile.SoundFileError as error:
            raise ValueError(str(error)) from error
        return np.ascontiguousarray(samples[:, 0]), int(rate)

    return decode


def _rows(table: Any, file: Path) -> Iterator[dict[str, Any]]:
    """Sound, word and split of every row, from the hub's columns or the subset's."""
    present = set(table.column_names)
    if not {"audio", "label"} <= present:
        raise DataError(f"{file} has no columns audio and label; it has {', '.join(table.column_names)}")
    sounds = encoded_values(table["audio"], file.parent, str(file))
    split = hub.split_of(file)
    for number, sound in enumerate(sounds):
        label = table["label"][number].as_py()
        word = table["keyword"][number].as_py() if "keyword" in present else WORDS[label] if label < len(WORDS) else "?"
        official = table["official_split"][number].as_py() if "official_split" in present else split
        yield {
            "number": number,
            "sound": sound.read_bytes() if isinstance(sound, Path) else sound,
            "word": word,
            "is_test": official not in ("train", "training"),
        }


def _synthesizer() -> str | None:
    return shutil.which("espeak-ng")


def _synthesized() -> Clips:
    program = _synthesizer()
    if program is None:
        raise DataError(
            "speech=espeak needs the program espeak-ng: apt install espeak-ng, brew install espeak-ng, "
            "or see https://github.com/espeak-ng/espeak-ng"
        )
    waves, words, is_test = [], [], []
    for voice in range(len(_ACCENTS) * len(_VARIANTS)):
        accent, variant = _ACCENTS[voice // len(_VARIANTS)], _VARIANTS[voice % len(_VARIANTS)]
        for word in _SPOKEN:
            for take, speed in enumerate(_SPEEDS):
                pitch = 30 + (7 * voice + 11 * take) % 40
                command = [program, "-v", f"{accent}+{variant}", "-s", str(speed), "-p", str(pitch), "--stdout", word]
                waves.append(one_second(*_run_espeak(command)))
                words.append(word)
                is_test.append(voice % 6 == 5)
    return Clips(torch.from_numpy(np.stack(waves)), words, torch.tensor(is_test))


def _run_espeak(command: list[str]) -> tuple[NDArray[Any], int]:
    process = subprocess.run(command, capture_output=True, check=False)
    try:
        with wave.open(io.BytesIO(process.stdout)) as sound:
            samples = np.frombuffer(sound.readframes(-1), "<i2") / 32768
            return samples, sound.getframerate()
    except (wave.Error, EOFError, ValueError) as error:
        message = process.stderr.decode(errors="replace").strip().partition("\n")[0] or str(error)
        raise DataError(f"{' '.join(command)} gave no sound: {message}") from error
