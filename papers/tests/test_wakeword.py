"""Wake words: clips found and decoded, heard by devices, compared with the start."""

from __future__ import annotations

import io
import stat
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from realdata import real_data

import kinfed
from kinfed.config.config import RunConfig
from kinfed.data.federations.federation import Federation
from kinfed.data.partitions import make_federation
from kinfed.data.sources import load_source
from kinfed.engine.task_factory import make_task
from kinfed.engine.zoo.models import build_model
from kinfed.errors import ConfigError, DataError
from kinfed_papers.data import speech, wakeword
from kinfed_papers.data.speech import RATE, Clips, one_second
from kinfed_papers.data.wakeword import DEVICES, SIZES, STATES, TYPES, WakewordDataOptions
from kinfed_papers.studies.detection import by_cell, detections, operating_threshold, relative_false_accepts, scores

SMALL = {"examples": 60, "least_test": 6, "mels": 16}


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("KINFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KINFED_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def sound(hertz: float, samples: int = RATE, rate: int = RATE) -> np.ndarray:
    return 0.3 * np.sin(2 * np.pi * hertz * np.arange(samples) / rate)


def flac(samples: np.ndarray, rate: int = RATE) -> bytes:
    soundfile = pytest.importorskip("soundfile")
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="FLAC")
    return buffer.getvalue()


def clip_rows(split: str, count: int) -> list[dict]:
    """Every third clip is the keyword, a tone of 1,200 Hz; the others are lower."""
    rows = []
    for k in range(count):
        keyword = k % 3 == 0
        rows.append({
            "audio": {"bytes": flac(sound(1200 if keyword else 300 + 20 * k, 6000)), "path": None},
            "label": 0 if keyword else 1, "keyword": "zero" if keyword else "one", "speaker_id": f"{split}{k}",
            "official_split": split,
        })  # fmt: skip
    return rows


def write(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)


@pytest.fixture
def recordings(tmp_path) -> Path:
    file = tmp_path / "data" / "speech_commands_8k_subset" / "train-00000-of-00001.parquet"
    write(file, clip_rows("training", 24) + clip_rows("validation", 4) + clip_rows("testing", 5))
    return file


# Clips.


def test_clips_last_one_second():
    assert one_second(sound(500, 300), RATE)[300:].tolist() == [0] * 7700
    assert len(one_second(sound(500, 9000), RATE)) == RATE
    resampled = one_second(sound(500, 16000, 16000), 16000) / 32767
    np.testing.assert_allclose(resampled[100:-100], sound(500)[100:-100], atol=2e-3)


def test_recordings_are_decoded_with_words_and_splits(recordings):
    clips = speech.find("auto", None).clips()
    assert clips.waves.shape == (33, RATE)
    assert clips.waves.dtype == torch.int16
    assert clips.words[:4] == ["zero", "one", "one", "zero"]
    assert clips.is_test.tolist() == [False] * 24 + [True] * 9  # validation and test speakers
    np.testing.assert_allclose(clips.waves[0, :6000].numpy() / 32768, sound(1200, 6000), atol=1e-4)
    assert not bool(clips.waves[0, 6000:].any())


def test_the_layout_of_the_hub(tmp_path):
    """No column names the word or the split; the file's name does, and labels are numbers. Noise is left out."""
    for split in ("train", "validation", "test"):
        rows = [
            {"audio": {"bytes": flac(sound(500, 16000, 16000), 16000), "path": None}, "label": label}
            for label in (10, 26, 30)
        ]
        write(tmp_path / "data" / "speech_commands" / f"{split}-00000-of-00001.parquet", rows)
    found = speech.find("speech_commands", None)
    clips = found.clips()
    assert clips.words == ["zero", "marvin"] * 3
    assert clips.is_test.tolist() == [False, False, True, True, True, True]
    assert speech.find("auto", None) == found


def test_bad_clips_are_named(recordings):
    rows = clip_rows("training", 2)
    rows[1]["audio"]["bytes"] = b"not a sound"
    write(recordings, rows)
    with pytest.raises(DataError, match=r"train-00000-of-00001\.parquet, row 1: cannot decode the clip"):
        speech.find("auto", None).clips()
    write(recordings, clip_rows("training", 2))
    with pytest.raises(DataError, match="none of test speakers"):
        speech.find("auto", None).clips()
    write(recordings, [{"text": "x"}])
    with pytest.raises(DataError, match="no columns audio and label; it has text"):
        speech.find("auto", None).clips()


def test_without_recordings_or_a_synthesizer_one_learns_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"no speech in .*put Speech Commands there.*or install espeak-ng"):
        load_source("wakeword")
    with pytest.raises(DataError, match=r"needs the program espeak-ng: apt install espeak-ng"):
        load_source("wakeword", options={"speech": "espeak"})


def synthesizer(folder: Path, output: bytes, code: int = 0) -> None:
    """A program of espeak-ng's name that writes these bytes."""
    folder.mkdir()
    (folder / "sound").write_bytes(output)
    program = folder / "espeak-ng"
    program.write_text(f"#!/bin/sh\n/bin/cat {folder / 'sound'}\necho no such voice >&2\nexit {code}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)


def test_synthetic_speech_is_called_so(tmp_path, monkeypatch):
    """WAV as espeak-ng streams it: 22,050 Hz, lengths in the header far beyond the data."""
    samples = (32767 * sound(440, 11025, 22050)).astype("<i2").tobytes()
    header = (
        b"RIFF" + struct.pack("<I", 0x7FFFF024) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 22050, 44100, 2, 16)
    )
    synthesizer(tmp_path / "bin", header + b"data" + struct.pack("<I", 0x7FFFF000) + samples)
    monkeypatch.setattr(speech, "_ACCENTS", ("en-us",))
    monkeypatch.setattr(speech, "_VARIANTS", ("m1", "m3", "m5", "f1", "f2", "f3"))
    monkeypatch.setattr(speech, "_SPEEDS", (150,))
    source = load_source("wakeword", options={**SMALL, "speech": "auto"})
    assert any("substitute" in note and "synthetic speech (espeak-ng)" in note for note in source.notes)
    wave = speech.find("espeak", None).clips().waves[0].numpy() / 32767
    np.testing.assert_allclose(wave[100:3900], sound(440)[100:3900], atol=5e-3)


def test_a_synthesizer_that_fails_is_quoted(tmp_path):
    synthesizer(tmp_path / "bin", b"", code=1)
    with pytest.raises(DataError, match=r"espeak-ng -v .* gave no sound: no such voice"):
        speech.find("espeak", None).clips()


# Devices.


def test_sizes_follow_table_2():
    found = wakeword.sizes(267_536, 2)
    assert {cell: train for cell, (train, _) in found.items()} == {
        (kind, state): size for state in STATES for kind, size in zip(TYPES, SIZES[state], strict=True) if size
    }
    assert found["A", "normal"] == (43922, 8784)  # a fifth for testing
    assert ("A", "alarm") not in found
    assert len(found) == 13
    assert min(min(counts) for counts in wakeword.sizes(26, 5).values()) >= 2
    assert set(DEVICES) == set(TYPES)


def test_examples_types_states_and_clients(recordings):
    source = load_source("wakeword", options={**SMALL, "clients_per_type": 4})
    assert source.features.shape == (1, 16, 51)
    assert source.features.raw.dtype == torch.uint8
    expected = wakeword.sizes(60, 6)
    kind = source.owner_groups[source.owners]
    for (name, state), counts in expected.items():
        here = (kind == TYPES.index(name)) & (source.tags == STATES.index(state))
        assert [int((here & (source.is_test == test)).sum()) for test in (False, True)] == list(counts)
        for test in (False, True):  # both labels everywhere
            assert len(source.labels[here & (source.is_test == test)].unique()) == 2
    assert source.owner_names[:5] == ["A-1", "A-2", "A-3", "A-4", "B-1"]
    sizes = torch.bincount(source.owners[~source.is_test], minlength=20).reshape(5, 4)
    assert int((sizes.max(1).values - sizes.min(1).values).max()) <= 1  # a uniform split
    assert "substitute" in source.notes[0]


def test_a_federation_knows_types_and_states(recordings):
    source = load_source("wakeword", options=SMALL)
    federation = make_federation(source, "column", None)
    assert federation.names == list(TYPES)
    assert federation.population(0).groups.tolist() == [0, 1, 2, 3, 4]
    assert federation.group_names == list(TYPES)
    assert federation.tag_names == list(STATES)
    assert any("substitute" in note for note in federation.notes)
    one = federation.pooled()
    assert one.num_clients == 1
    assert one.train.rows.tolist() == sorted(federation.train.rows.tolist())


def test_everything_is_drawn_from_the_options(recordings, tmp_path):
    first = load_source("wakeword", options=SMALL)
    assert len(list((tmp_path / "cache" / "decoded").iterdir())) == 1
    for file in (tmp_path / "cache" / "decoded").iterdir():
        file.unlink()
    again = load_source("wakeword", seed=5, options=SMALL)  # a run's seed does not change the data
    assert torch.equal(first.features.raw, again.features.raw)
    other = load_source("wakeword", options={**SMALL, "draw": 1})
    assert not torch.equal(first.features.raw, other.features.raw)
    four = load_source("wakeword", options={**SMALL, "clients_per_type": 4})
    assert torch.equal(first.features.raw, four.features.raw)
    assert len(list((tmp_path / "cache" / "decoded").iterdir())) == 2  # who owns examples needs no rendering


def test_an_example_does_not_depend_on_how_many_are_made(recordings):
    clips = speech.find("auto", None).clips()
    listener = wakeword._Listener(clips, torch.tensor([w == "zero" for w in clips.words]), WakewordDataOptions(mels=16))
    heard, keys = torch.tensor([0, 1, 2]), torch.tensor([11, 12, 13])
    for state in STATES:
        together = listener._wave("B", state, False, heard, keys)
        alone = listener._wave("B", state, False, heard[1:2], keys[1:2])
        torch.testing.assert_close(alone[0], together[1], atol=1e-6, rtol=1e-5)


def test_training_clips_belong_to_one_type_and_test_clips_to_none(recordings):
    clips = speech.find("auto", None).clips()
    listener = wakeword._Listener(clips, torch.tensor([w == "zero" for w in clips.words]), WakewordDataOptions(mels=16))
    for word in (False, True):
        piles = listener.pools[word].lists()
        trained = torch.cat(piles[:5])
        assert len(trained.unique()) == len(trained)
        assert not bool(clips.is_test[trained].any())
        assert bool(clips.is_test[piles[5]].all())
        assert all(len(pile) for pile in piles)


def test_nobody_is_tested_on_speakers_of_the_training_clips(recordings, monkeypatch):
    clips = speech.find("auto", None).clips()
    is_keyword = torch.tensor([word == "zero" for word in clips.words])
    listener = wakeword._Listener(clips, is_keyword, WakewordDataOptions(mels=16))
    heard = []
    record = listener._wave
    monkeypatch.setattr(listener, "_wave", lambda *of: heard.append(of[3]) or record(*of))
    for kind in TYPES:
        for test in (False, True):
            heard.clear()
            made = listener.hears(kind, "normal", test, 9)
            assert clips.is_test[torch.cat(heard)].tolist() == [test] * 9
            assert is_keyword[torch.cat(heard)].long().tolist() == made["labels"].tolist()
            own = torch.cat([listener.pools[word][5 if test else TYPES.index(kind)] for word in (False, True)])
            assert bool(torch.isin(torch.cat(heard), own).all())


def test_devices_and_states_sound_different():
    waves = torch.from_numpy(np.random.default_rng(0).normal(size=(40, RATE)) * 3000).to(torch.int16)
    clips = Clips(waves, ["zero", "one"] * 20, torch.arange(40) >= 30)
    listener = wakeword._Listener(clips, torch.arange(40) % 2 == 0, WakewordDataOptions(mels=16))
    heard, keys = torch.arange(8), torch.arange(8)
    spectrum = {
        k: listener.picture.decibels(listener._wave(k, "normal", False, heard, keys)).mean((0, 2)) for k in TYPES
    }
    assert float(spectrum["A"][14] - spectrum["C"][14]) > 5  # behind cloth, high bands are weak
    assert float(spectrum["A"][1] - spectrum["B"][1]) > 5  # a small microphone passes no bass
    normal = listener._wave("E", "normal", False, heard, keys)
    assert float((listener._wave("E", "alarm", False, heard, keys) - normal).abs().max()) > 0.01
    assert float((listener._wave("E", "playback", False, heard, keys) - normal).abs().max()) > 0.01


def test_options_and_words_that_do_not_go(recordings):
    for options, words in (
        ({"examples": 10}, "examples must be at least 26; got 10"),
        ({"positives": 1.0}, r"positives must be in \(0, 1\); got 1.0"),
        ({"clients_per_type": 0}, "clients_per_type must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_source("wakeword", options=options)
    with pytest.raises(DataError, match=r"hold 0 of 'marvin' among .* Words there are: one, zero"):
        load_source("wakeword", options={**SMALL, "keyword": "marvin"})


# Detection.


def hand_made() -> tuple[Federation, torch.Tensor]:
    """Two types, two states; every client's test examples are 4 positive and 4 negative ones of each state."""
    n = 2 * 2 * 8
    labels = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0] * 4)
    owner = torch.arange(n) // 16
    x = torch.arange(n, dtype=torch.float32)[:, None]
    extra = torch.tensor([[0.0]] * 2)
    federation = Federation.from_arrays(
        torch.cat([x, extra]), torch.cat([labels, torch.tensor([0, 1])]),
        torch.cat([owner, torch.tensor([0, 1])]).numpy(), test_rows=np.array([True] * n + [False] * 2), num_classes=2,
        groups={0: "A", 1: "B"},
    )  # fmt: skip
    federation.tags = torch.cat([torch.arange(n) // 8 % 2, torch.tensor([0, 0])])
    federation.tag_names = ["normal", "alarm"]
    return federation, labels


def test_cells_are_compared_one_by_one():
    federation, labels = hand_made()
    rows = federation.test.rows
    g = torch.Generator().manual_seed(0)
    baseline = labels[rows] + torch.rand(len(rows), generator=g, dtype=torch.float64)
    better = labels[rows] * 0.8 + torch.rand(len(rows), generator=g, dtype=torch.float64)
    threshold = operating_threshold(baseline, federation, 0.25)
    positive = labels[rows] == 1
    assert int((baseline[positive] < threshold).sum()) == 4  # a quarter of sixteen
    found = by_cell(better, baseline, federation, threshold)
    same = by_cell(baseline, baseline, federation, threshold)
    for (group, tag), cell in found.items():
        here = (federation.test.owner == "AB".index(group)) & (federation.tags[rows] == ["normal", "alarm"].index(tag))
        assert cell == relative_false_accepts(better[here], baseline[here], positive[here], threshold)
        assert same[group, tag].ratio in (1.0, None)


def test_every_client_is_scored_by_its_own_model():
    federation, _ = hand_made()
    task = make_task(lambda: torch.nn.Sequential(torch.nn.Linear(1, 2, bias=False)))
    theta = torch.tensor([[0.0, 1.0], [1.0, -1.0]])  # score x for client 0, -2 x for client 1
    x = federation.features.raw[federation.test.rows, 0].double()
    expected = torch.where(federation.test.owner == 0, x, -2 * x)
    torch.testing.assert_close(scores(task, theta, federation), expected)


def test_detection_asks_for_what_it_needs():
    federation, _ = hand_made()
    federation.tags = None
    with pytest.raises(DataError, match="group of clients and tag of examples"):
        by_cell(torch.zeros(32), torch.zeros(32), federation, 0.0)
    with pytest.raises(ConfigError, match="between 0 and 1; got 0"):
        operating_threshold(torch.zeros(32), federation, 0.0)


RUN = {
    "dataset": {"name": "wakeword", **SMALL}, "model": {"name": "wakeword_cnn", "width": 2}, "rounds": 1, "steps": 2,
    "batch": 8, "lr": 0.02, "seeds": (0,), "participation": 1.0, "eval_every": 0,
}  # fmt: skip


def test_a_run_from_a_pre_trained_start_to_relative_false_accepts(recordings, tmp_path):
    methods = {
        "selffl": {},
        "selffl_cluster": {},
        "w": {"method": "fedavg"},
        "e": {"method": "fedavg", "weights": "equal"},
    }
    result = kinfed.run(**RUN, pretrain=2, algorithms=methods, out=tmp_path / "run")
    found = detections(tmp_path / "run", 0.2)
    assert set(found) == {(label, 0) for label in methods}
    assert result.result("selffl_cluster").evaluation is not None
    for one in found.values():
        assert one.server_model is not None
        assert set(one.personal) <= {(kind, state) for kind in TYPES for state in STATES}
        assert all(cell.ratio is None or cell.ratio >= 0 for cell in one.personal.values())
    again = kinfed.run(**RUN, pretrain=2, algorithms={"w": {"method": "fedavg"}})
    assert torch.equal(
        again.result().server_model, result.result("w").server_model
    )  # the same start, whoever else runs
    other = kinfed.run(**RUN, algorithms={"w": {"method": "fedavg"}})
    assert not torch.equal(other.result().server_model, result.result("w").server_model)


def test_runs_without_a_start_have_nothing_to_compare_with(recordings, tmp_path):
    kinfed.run(**RUN, algorithms="fedavg", out=tmp_path / "run")
    with pytest.raises(ConfigError, match="no common start to compare with"):
        detections(tmp_path / "run")
    with pytest.raises(ConfigError, match="pre-training sees the data of all clients"):
        kinfed.run(**RUN, algorithms="fedavg", pretrain=1, dp_noise=1.0)


def test_runs_without_pre_training_keep_their_identity():
    config = RunConfig()
    assert "pretrain" in config.dump()
    assert config.fingerprint() != replace(config, pretrain=1).fingerprint()


def test_the_network_has_eleven_layers_and_three_million_parameters():
    model = build_model("wakeword_cnn", (1, 40, 51), 2)
    kinds = [type(layer).__name__ for layer in model]
    assert (kinds.count("Conv2d"), kinds.count("MaxPool2d")) == (7, 4)
    assert 2.9e6 < sum(p.numel() for p in model.parameters()) < 3.1e6


def test_real_recordings():
    data = real_data("speech_commands_8k_subset")
    clips = speech.find("speech_commands_8k_subset", data).clips()
    assert len(clips.words) == 3679
    assert clips.words.count("zero") == 315
    assert int(clips.is_test.sum()) == 601
    made = wakeword.render(WakewordDataOptions(**SMALL), clips)
    raw = made["raw"].float()
    assert 130 < float(raw.mean()) < 200
    assert float(((raw == 0) | (raw == 255)).float().mean()) < 0.05  # the scale fits
