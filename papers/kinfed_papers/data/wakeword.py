"""Wake-word detection on five types of devices: a substitute for the private recordings of Self-FL's paper.

Spoken words (speech.py) are heard by devices of five types, A to E, each with its own microphone, room and
noise floor, in three states: normal, playback (the device plays speech or music) and alarm. One word is to be
recognized, all others are to be ignored. Sizes are in the proportions of Table 2 of the paper.

    heard = microphone(room(speech) + playback or alarm) + noise

A clip is heard once or several times, each time at another moment, loudness, mixture and noise. Training clips belong
to one device type each; all types are tested on the same clips, of speakers that are in no training data. Every draw is
a hash of (draw, split, type, state, number), so any part can be made again alone; spectrograms are kept in the cache
folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kinfed.core import option, rng
from kinfed.data import Features, Problem, Ragged
from kinfed.data.sources import Source, hub
from kinfed.errors import DataError
from kinfed_papers.data import audio, speech
from kinfed_papers.data.speech import RATE, Clips, Speech

STATES = ("normal", "playback", "alarm")
TYPES = ("A", "B", "C", "D", "E")
# Table 2 of the paper: training examples by state and type. A and C have no alarm.
SIZES: dict[str, tuple[int, int, int, int, int]] = {
    "normal": (43922, 28852, 10404, 76804, 51097),
    "playback": (12011, 4223, 4336, 21511, 10985),
    "alarm": (0, 646, 0, 1427, 1318),
}
PAPER_EXAMPLES = sum(map(sum, SIZES.values()))
NUM_CONDITIONS = sum(size > 0 for of_types in SIZES.values() for size in of_types)  # pairs of type and state
TEST_SHARE = 0.2  # "around 20% the size of training data"
SUBSTITUTE = (
    "wakeword is a substitute for the private recordings of Self-FL's paper: {title}, heard through simulated "
    "microphones, rooms, playback and alarms; its figures compare with the paper's in kind only"
)
_FORMAT = "wakeword-1"
_AT_ONCE = 32  # waves of a second, few enough to stay in cache
_SPEECH_LEVEL = 0.05  # loudness of speech at the device, of which noise floors are this many dB
_MEAN, _STD = 165.0, 35.0  # about those of the bytes of all spectrograms


@dataclass(frozen=True)
class Device:
    """A type of device: what its microphone passes (dB at Hz), how long its room rings, and its noise."""

    response: tuple[tuple[float, float], ...]
    echo_seconds: float
    echo_energy: float  # of the echo, where that of the direct sound is 1
    noise_db: float  # of the noise floor, where speech is 0


DEVICES: dict[str, Device] = {
    "A": Device(((100, 0), (3600, 0)), 0.2, 0.1, -35),  # a good microphone in a furnished room
    "B": Device(((150, -25), (500, -6), (1800, 8), (3000, 2)), 0.3, 0.3, -25),  # small and shrill
    "C": Device(((200, 3), (900, 0), (1600, -18), (3500, -30)), 0.5, 0.8, -15),  # behind cloth
    "D": Device(((100, -3), (1000, 0), (2800, 5)), 0.7, 1.5, -25),  # at the far end of a hall
    "E": Device(((200, 0), (700, -3), (1100, -22), (1600, -3), (3500, -6)), 0.15, 0.1, -10),  # a notch, and noisy
}


@dataclass(frozen=True)
class WakewordDataOptions:
    keyword: str = option("zero", "the word to be recognized, against all others")
    examples: int = option(
        8000, f"training examples of all types and states; {PAPER_EXAMPLES:,} in the paper", ge=2 * NUM_CONDITIONS
    )
    positives: float = option(0.3, "share of examples that hold the keyword", gt=0, lt=1)
    clients_per_type: int = option(1, "clients among whom a type's examples are dealt: 1, or 4 to select from", ge=1)
    least_test: int = option(
        400, "test examples of every type and state at least; else a fifth of the training ones", ge=2
    )
    mels: int = option(40, "frequency bands of a spectrogram", ge=16, le=128)
    speech: Speech = option("auto", "whose voices: auto takes the first of the others that is there")
    draw: int = option(0, "another number, another draw of the whole data set")


def sizes(examples: int, least_test: int) -> dict[tuple[str, str], tuple[int, int]]:
    """(type, state) -> training and test examples, of those that exist."""
    counts = {}
    for state in STATES:
        for kind, size in zip(TYPES, SIZES[state], strict=True):
            if size:
                train = max(round(examples * size / PAPER_EXAMPLES), 2)
                counts[kind, state] = (train, max(round(TEST_SHARE * train), least_test))
    return counts


def load(options: WakewordDataOptions, data_dir: Path | None, seed: int) -> Source:
    recordings = speech.find(options.speech, data_dir)
    decisive = dataclasses.asdict(options) | {"format": _FORMAT, "speech": recordings.name}
    del decisive["clients_per_type"]  # who owns an example does not change it
    settings = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:12]
    rendered = hub.cached(f"wakeword-{settings}", recordings.files, lambda: render(options, recordings.clips()))
    owners, names = _dealt(rendered["kind"], rendered["is_test"], options)
    num_test = int(rendered["is_test"].sum())
    train_clips, test_clips = rendered["clips"].tolist()
    notes = [
        SUBSTITUTE.format(title=recordings.title),
        f"{len(rendered['is_test']) - num_test:,} training examples of {train_clips:,} clips and "
        f"{num_test:,} test examples of {test_clips:,}: a clip is heard several times",
    ]
    return Source(
        "wakeword",
        Features(rendered["raw"], torch.tensor(_MEAN), torch.tensor(_STD)),
        rendered["labels"],
        Problem.of_classes(2, ["other words", options.keyword]),
        rendered["is_test"],
        owners=owners,
        owner_names=names,
        owner_groups=torch.arange(len(TYPES)).repeat_interleave(options.clients_per_type),
        group_names=list(TYPES),
        tags=rendered["state"],
        tag_names=list(STATES),
        notes=notes,
    )


def _dealt(kind: Tensor, is_test: Tensor, options: WakewordDataOptions) -> tuple[Tensor, list[str]]:
    """The client of every example: a type's examples, in random order, to its clients in turn."""
    share = options.clients_per_type
    owners = torch.empty_like(kind)
    for test in (False, True):
        for number in range(len(TYPES)):
            rows = ((kind == number) & (is_test == test)).nonzero().squeeze(1)
            order = rng.permutation(rng.fold(rng.root(options.draw, "wakeword-clients"), number, int(test)), len(rows))
            owners[rows[order]] = number * share + torch.arange(len(rows)) % share
    return owners, list(TYPES) if share == 1 else [f"{kind}-{k + 1}" for kind in TYPES for k in range(share)]


def render(options: WakewordDataOptions, clips: Clips) -> dict[str, Tensor]:
    """Spectrograms of all examples, their labels, types, states and splits; and how many clips they were made of."""
    is_keyword = torch.tensor([word == options.keyword for word in clips.words])
    for test, which in ((True, "test"), (False, "training")):
        heard = is_keyword[clips.is_test == test]
        if not bool(heard.any()) or bool(heard.all()):
            known = ", ".join(sorted(set(clips.words)))
            raise DataError(
                f"the {which} clips hold {int(heard.sum())} of {options.keyword!r} among {len(heard)}; the keyword "
                f"and other words are needed. Words there are: {known}"
            )
    listener = _Listener(clips, is_keyword, options)
    parts: list[dict[str, Tensor]] = []
    for (kind, state), counts in sizes(options.examples, options.least_test).items():
        parts += [listener.hears(kind, state, test, counts[int(test)]) for test in (False, True)]
    examples = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return examples | {"clips": torch.tensor([int((~clips.is_test).sum()), int(clips.is_test.sum())])}


class _Listener:
    def __init__(self, clips: Clips, is_keyword: Tensor, options: WakewordDataOptions) -> None:
        self.clips, self.is_keyword, self.options = clips, is_keyword, options
        self.key = rng.root(options.draw, "wakeword")
        self.picture = audio.Spectrogram(RATE, options.mels)
        self.pools = {word: self._pools(word) for word in (False, True)}

    def _pools(self, keyword: bool) -> Ragged:
        """Clips by pile: the training clips of every type, in the types' proportions, then all test clips."""
        wanted = self.is_keyword == keyword
        train = (wanted & ~self.clips.is_test).nonzero().squeeze(1)
        test = (wanted & self.clips.is_test).nonzero().squeeze(1)
        if len(train) < len(TYPES):
            raise DataError(
                f"{len(train)} training clips of {'the keyword' if keyword else 'other words'} cannot serve "
                f"{len(TYPES)} types of devices, which share none; use more recordings"
            )
        order = train[rng.permutation(rng.fold(self.key, 0, int(keyword)), len(train))]
        of_type = torch.tensor([sum(SIZES[state][k] for state in STATES) for k in range(len(TYPES))])
        ends = (of_type.cumsum(0) / of_type.sum() * (len(train) - len(TYPES))).round().long()
        ends += torch.arange(1, len(TYPES) + 1)  # one clip for every type before the proportions
        return Ragged.of([*torch.tensor_split(order, ends[:-1]), test])

    def hears(self, kind: str, state: str, test: bool, count: int) -> dict[str, Tensor]:
        number, state_number = TYPES.index(kind), STATES.index(state)
        key = rng.fold(self.key, 1, int(test), number, state_number)
        positives = min(max(round(self.options.positives * count), 1), count - 1)
        labels = (torch.arange(count) < positives).long()
        heard = torch.empty(count, dtype=torch.int64)
        for word, n in ((True, positives), (False, count - positives)):
            pile = self.pools[word][len(TYPES) if test else number]
            order = rng.permutation(rng.fold(key, 0, int(word)), len(pile))
            heard[labels == int(word)] = pile[order[torch.arange(n) % len(pile)]]
        keys = rng.fold(key, 1, torch.arange(count))
        chunks = zip(torch.split(heard, _AT_ONCE), torch.split(keys, _AT_ONCE), strict=True)
        raw = torch.cat([self.picture.bytes(self._wave(kind, state, test, *chunk)) for chunk in chunks])
        return {
            "raw": raw,
            "labels": labels,
            "kind": torch.full((count,), number),
            "state": torch.full((count,), state_number),
            "is_test": torch.full((count,), test),
        }

    def _wave(self, kind: str, state: str, test: bool, heard: Tensor, keys: Tensor) -> Tensor:
        """[n, RATE] what a device of this type records of these clips."""
        device = DEVICES[kind]
        u = rng.uniform(keys, 5).to(torch.float32)
        waves = self.clips.waves[heard].to(torch.float32) / 32768
        waves = audio.shifted(waves, ((u[:, 0] - 0.5) * 0.2 * RATE).long())  # up to 0.1 s either way
        level = _SPEECH_LEVEL * 10 ** ((u[:, 1:2] - 0.5) * 12 / 20)  # up to 6 dB either way
        waves = waves / audio.loudness(waves) * level
        fixed = rng.fold(rng.root(0, "wakeword-rooms"), TYPES.index(kind))  # a type's room is that of every draw
        waves = audio.convolved(waves, audio.room(fixed, RATE, device.echo_seconds, device.echo_energy)[None])
        if state == "playback":
            waves = audio.mixed(waves, self._playback(test, keys, u[:, 2]), 10 * u[:, 3])  # speech 0 to 10 dB louder
        elif state == "alarm":
            waves = audio.mixed(waves, audio.alarm(rng.fold(keys, 3), RATE, RATE), 10 * u[:, 3] - 5)
        waves = audio.convolved(waves, audio.microphone(device.response, RATE)[None])
        noise = rng.normal(rng.fold(keys, 4), RATE).to(torch.float32)
        return waves + noise * (_SPEECH_LEVEL * 10 ** (device.noise_db / 20))

    def _playback(self, test: bool, keys: Tensor, choice: Tensor) -> Tensor:
        """Music, or with equal chances two other words at once, of the speakers of the same split."""
        pool = (~self.is_keyword & (self.clips.is_test == test)).nonzero().squeeze(1)
        pick = (rng.uniform(rng.fold(keys, 5), 2) * len(pool)).long()
        voices = self.clips.waves[pool[pick]].to(torch.float32).sum(1) / 32768
        tune = audio.music(rng.fold(keys, 6), RATE, RATE)
        return torch.where(choice[:, None] < 0.5, voices / audio.loudness(voices), tune / audio.loudness(tune))
