"""Tweets: cut into words, numbered, looked up, shared out by user."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from realdata import real_data

import kinfed
from kinfed.data.examples.features import Features
from kinfed.data.federations.federation import Federation
from kinfed.data.partitions import make_federation
from kinfed.data.sources import hub, load_source
from kinfed.data.sources.text import PADDING, UNKNOWN, numbers, read_vectors, tokens
from kinfed.errors import ConfigError, DataError

TWEETS = [
    ("ann", 0, "I don't like rain"),
    ("bob", 4, "Sun!"),
    ("ann", 4, "sun &amp; sea, @bob http://t.co/x"),
    ("cyd", 0, "rain rain"),
    ("bob", 0, "no sun"),
    ("ann", 4, ""),
]
VECTORS = {"rain": [1.0, 0.0], "sun": [0.0, 2.0], "n't": [-1.0, 1.0], "!": [0.5, 0.5], "unused": [9.0, 9.0]}


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("KINFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KINFED_DATA", str(tmp_path / "data"))


def write_tweets(file: Path, rows=TWEETS) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    users, sentiments, texts = zip(*rows, strict=True)
    columns = {"text": texts, "date": [""] * len(rows), "user": users, "sentiment": pa.array(sentiments, pa.int32())}
    pq.write_table(pa.table(columns), file)


@pytest.fixture
def folder(tmp_path) -> Path:
    data = tmp_path / "data"
    write_tweets(data / "sentiment140" / "train-00000-of-00001.parquet")
    lines = [f"{word} {' '.join(map(str, vector))}" for word, vector in VECTORS.items()]
    (data / "glove.6B.300d.txt").write_text("\n".join(lines) + "\n")
    return data


def load(**options):
    return load_source("sentiment140", options={"min_tweets": 1, "words": 4, **options})


def test_texts_are_cut_as_glove_is():
    assert tokens("I DON'T know, it's 5 o'clock!!") == [
        "i", "do", "n't", "know", ",", "it", "'s", "5", "o", "'", "clock", "!", "!",
    ]  # fmt: skip
    assert tokens("@ann_b see https://a.b/c?d &lt;3") == ["@ann_b", "see", "https://a.b/c?d", "<", "3"]
    assert tokens("can't won't") == ["ca", "n't", "wo", "n't"]
    assert tokens(" \n") == []


@given(st.lists(st.sampled_from(["a", "b", "?"])), st.integers(1, 6))
def test_numbers_fill_the_end_of_a_row(words, length):
    row = numbers(words, {"a": 2, "b": 3}, length)
    read = words[:length]
    assert len(row) == length
    assert row[: length - len(read)] == [PADDING] * (length - len(read))
    assert row[length - len(read) :] == [{"a": 2, "b": 3}.get(word, UNKNOWN) for word in read]


def test_tweets_become_vectors(folder):
    source = load()
    assert source.labels.tolist() == [0, 1, 1, 0, 0, 1]
    assert [source.owner_names[k] for k in source.owners.tolist()] == ["ann", "bob", "ann", "cyd", "bob", "ann"]
    assert source.features.raw.dtype == torch.int32
    assert source.features.shape == (4, 2)
    x = source.features.gather(torch.arange(6))
    mean = np.mean([VECTORS[word] for word in ("!", "n't", "rain", "sun")], axis=0)  # "unused" occurs nowhere
    expected = [
        [mean, mean, VECTORS["n't"], mean],  # i do n't like: four words are read
        [[0, 0], [0, 0], VECTORS["sun"], VECTORS["!"]],
        [VECTORS["sun"], mean, mean, mean],
        [[0, 0], [0, 0], VECTORS["rain"], VECTORS["rain"]],
        [[0, 0], [0, 0], mean, VECTORS["sun"]],
        [[0, 0]] * 4,
    ]
    torch.testing.assert_close(x, torch.tensor(np.array(expected), dtype=torch.float32))
    assert "of the words have no GloVe vector" in source.notes[0]


def test_parquet_vectors_are_as_good_as_a_text_file(folder):
    first = load()
    vectors = pa.array(VECTORS.values(), pa.list_(pa.float32(), 2))
    (folder / "small").mkdir()
    pq.write_table(pa.table({"word": list(VECTORS), "vector": vectors}), folder / "small" / "train.parquet")
    second = load(vectors="small")
    assert torch.equal(first.features.raw, second.features.raw)
    assert torch.equal(first.features.vectors, second.features.vectors)
    assert torch.equal(load(vectors=str(folder / "glove.6B.300d.txt")).features.vectors, first.features.vectors)


def test_users_with_few_tweets_are_left_out(folder):
    source = load(min_tweets=2)
    assert source.owner_names == ["ann", "bob"]
    assert len(source) == 5
    with pytest.raises(DataError, match="no user of sentiment140 has 30 tweets, the most active one has 3"):
        load_source("sentiment140")


def test_a_second_load_reads_the_cache_and_a_new_file_does_not(folder, tmp_path):
    first = load()
    assert len(list((tmp_path / "cache" / "decoded").iterdir())) == 1
    assert torch.equal(load().features.raw, first.features.raw)
    (folder / "glove.6B.300d.txt").write_text("rain 3.0 4.0 5.0\n")
    assert load().features.shape == (4, 3)


def test_bad_files_are_explained(folder):
    with pytest.raises(DataError, match=r"no word vectors at nowhere or .*nowhere; unpack glove"):
        load(vectors="nowhere")
    with pytest.raises(ConfigError, match="words must be at least 1; got 0"):
        load(words=0)
    (folder / "glove.6B.300d.txt").write_text("zebra 1 2\n")
    with pytest.raises(DataError, match="none of the words of sentiment140 has a vector"):
        load()
    (folder / "glove.6B.300d.txt").write_text("zebra 1 2\nrain 1 two\n")
    with pytest.raises(DataError, match="line 2: a word and its numbers were expected"):
        load()
    (folder / "glove.6B.300d.txt").write_text("sun 1 2\nrain 1\n")
    with pytest.raises(DataError, match="different lengths, 1 and 2"):
        load()
    write_tweets(folder / "sentiment140" / "train-00000-of-00001.parquet", [("ann", 2, "so so")])
    with pytest.raises(DataError, match=r"sentiment is 0 \(negative\) or 4 \(positive\); found \[2\]"):
        load()


def test_only_wanted_words_are_kept(tmp_path):
    file = tmp_path / "v.txt"
    file.write_text("a 1 2\nb 3 4\n")
    assert {word: vector.tolist() for word, vector in read_vectors([file], {"b", "c"}).items()} == {"b": [3.0, 4.0]}


# Features that are numbers of vectors.


def test_gathering_into_given_memory_is_the_same():
    raw = torch.tensor([[0, 2], [1, 1], [2, 0]], dtype=torch.int32)
    features = Features(raw, vectors=torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]))
    index = torch.tensor([[2, 0], [1, 1]])
    x = features.gather(index)
    assert x.shape == (2, 2, 2, 3)
    assert x[0, 0].tolist() == [[6, 7, 8], [0, 1, 2]]
    memory = torch.full((2, 2, 2, 3), -1.0)
    assert torch.equal(features.gather(index, into=memory), x)
    assert torch.equal(memory, x)
    assert features.example_bytes == 24
    assert not features.is_tokens


def test_numbers_without_a_vector_are_refused():
    vectors = torch.zeros(3, 2)
    with pytest.raises(DataError, match=r"examples name vectors 0\.\.2; found 0\.\.3"):
        Features(torch.tensor([[0, 3]]), vectors=vectors)
    with pytest.raises(DataError, match=r"int32 or int64 without mean and std; got torch\.uint8"):
        Features(torch.zeros(2, 2, dtype=torch.uint8), vectors=vectors)
    with pytest.raises(DataError, match="finite float32"):
        Features(torch.zeros(2, 2, dtype=torch.int64), vectors=vectors.double())


def test_a_saved_federation_keeps_vectors_and_tags(folder, tmp_path):
    source = load()
    source.tags, source.tag_names = torch.tensor([0, 1, 0, 1, 0, 1]), ["day", "night"]
    federation = make_federation(source, "column", None)
    federation.save(tmp_path / "saved")
    back = Federation.load(tmp_path / "saved")
    assert torch.equal(back.features.gather(torch.arange(6)), source.features.gather(torch.arange(6)))
    assert back.tags.tolist() == [0, 1, 0, 1, 0, 1]
    assert back.tag_names == ["day", "night"]


# Whole runs.


def test_a_run_takes_users_as_clients(folder):
    result = kinfed.run(
        dataset={"name": "sentiment140", "min_tweets": 2, "words": 4}, model={"name": "lstm", "hidden": 3, "layers": 1},
        algorithms="fedavg,fedavg_data", rounds=2, seeds=(0,), steps=2, batch=2, participation=1.0,
    )  # fmt: skip
    assert result.federations[0].names == ["ann", "bob"]
    assert result.task.num_params == 4 * 3 * (2 + 3 + 2) + 3 * 2 + 2
    assert result.config.dump()["model"] == {"name": "lstm", "hidden": 3, "layers": 1}


def test_the_subset_says_what_it_is():
    data = real_data("sentiment140_subset")
    real_data("glove_6b_50d_subset")
    source = load_source("sentiment140_subset", data)
    assert source.features.shape == (25, 50)
    assert len(source.owner_names) == 94
    assert any("biased" in note and "never for a figure" in note for note in source.notes)
    federation = make_federation(source, "column", None, {"test_fraction": 0.2})
    assert any("biased" in note for note in federation.notes)


# Files of the hub.


def test_conversions_of_the_hub_are_fetched_where_a_repository_holds_a_script(tmp_path, monkeypatch):
    asked = []

    def download(repository, *, repo_type, allow_patterns, local_dir, revision):
        asked.append((revision, allow_patterns))
        if revision == hub.CONVERTED:
            for split in ("train", "test"):
                write_tweets(Path(local_dir) / "v1" / split / "0000.parquet", TWEETS[:2])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    wanted = hub.ParquetSet("tweets", ("train", "test"), "someone/tweets", within="v1")
    found = hub.obtain(wanted, tmp_path / "data")
    assert asked == [(None, ["v1/*.parquet"]), (hub.CONVERTED, ["v1/*.parquet"])]
    assert [file.relative_to(tmp_path) for file in found["test"]] == [Path("data/tweets/test/0000.parquet")]
    assert len(found["train"]) == 1
    assert hub.obtain(wanted, tmp_path / "data") == found
    assert len(asked) == 2
