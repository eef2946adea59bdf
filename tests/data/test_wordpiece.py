"""Texts become tokens: by BERT's rules, from a table of one's own, and for reviews by domain."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kinfed
from kinfed.data.partitions import make_federation
from kinfed.data.sources import load_source
from kinfed.data.sources.wordpiece import WordPiece
from kinfed.errors import ConfigError, DataError
from kinfed.serving.export import export_model
from kinfed.serving.pipeline import ModelPipeline
from kinfed.serving.predict import predict

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "book", "##s", "a", "!", "##y", "Good"]
PAD, UNK, CLS, SEP, GOOD, BAD, BOOK, S, A, MARK, Y, CAPITAL = range(12)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KINFED_DATA", str(tmp_path / "data"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tokenizer")
    (place / "vocab.txt").write_text("\n".join(PIECES) + "\n", "utf-8")
    return place


def test_a_text_is_cut_into_pieces_and_padded(folder: Path) -> None:
    tokens = WordPiece.load(folder).encode(["A GOOD book!", "böoks goody", ""], 7)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [
        [CLS, A, GOOD, BOOK, MARK, SEP, PAD],
        [CLS, BOOK, S, GOOD, Y, SEP, PAD],
        [CLS, SEP, PAD, PAD, PAD, PAD, PAD],
    ]


def test_a_long_text_is_cut_behind_and_keeps_its_end_mark(folder: Path) -> None:
    assert WordPiece.load(folder).encode(["good bad " * 50], 5).tolist() == [[CLS, GOOD, BAD, GOOD, SEP]]


@given(
    words=st.lists(st.sampled_from(["good", "books", "\x00", "!!", "a", "strange", "\u200d"]), max_size=12),
    length=st.integers(3, 9),
)
def test_reading_the_first_words_is_reading_the_text(folder: Path, words: list[str], length: int) -> None:
    pieces = WordPiece.load(folder)
    text = "  ".join(words)
    ours = pieces.encode([text], length)[0].tolist()
    assert ours == pieces.tokenizer.encode(text).ids


def test_a_whole_tokenizer_is_preferred_to_a_vocabulary(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("rubbish")
    WordPiece.load(folder).tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert WordPiece.load(tmp_path).encode(["a book"], 4).tolist() == [[CLS, A, BOOK, SEP]]
    assert WordPiece.load(tmp_path).vocabulary == len(PIECES)


def test_capitals_count_where_the_settings_say_so(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text((folder / "vocab.txt").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    assert WordPiece.load(tmp_path).encode(["Good good"], 4).tolist() == [[CLS, CAPITAL, GOOD, SEP]]


def test_folders_without_a_fitting_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer in .* tokenizer.json or vocab.txt"):
        WordPiece.load(tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\ngood\n")
    with pytest.raises(DataError, match=r"vocab.txt lacks \[CLS\], \[SEP\], \[UNK\]"):
        WordPiece.load(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(["good", *PIECES[:4]]))
    with pytest.raises(DataError, match=r"whose token 0 is \[PAD\].*with \[PAD\] as 1"):
        WordPiece.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json is no tokenizer"):
        WordPiece.load(tmp_path)


def test_without_the_library_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def lacking(name: str, *rest: Any) -> Any:
        if name == "tokenizers":
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(DataError, match=r"pip install 'kinfed\[text\]'"):
        WordPiece.load(folder)


# --- a table of one's own

ROLES = {"label_column": "stars", "client_column": "shop", "text_column": "words", "length": 6}


def write_table(file: Path, rows: int = 12) -> Path:
    texts = ["good book", "bad book", "good", "bad bad", "a good book !", "a bad book !"] * (rows // 6)
    stars = ["many", "few"] * (rows // 2)
    shop = ["x", "x", "x", "x", "y", "y"] * (rows // 6)
    pq.write_table(pa.table({"words": texts, "stars": stars, "shop": shop, "price": list(range(rows))}), file)
    return file


def test_a_column_of_texts_becomes_tokens(folder: Path, tmp_path: Path) -> None:
    table = write_table(tmp_path / "t.parquet")
    federation = make_federation(load_source(str(table), options={**ROLES, "tokenizer": str(folder)}), "column", None)
    assert federation.names == ["x", "y"]
    assert federation.features.is_tokens
    assert federation.features.gather(torch.tensor([0, 4])).tolist() == [
        [CLS, GOOD, BOOK, SEP, PAD, PAD], [CLS, A, GOOD, BOOK, MARK, SEP],
    ]  # fmt: skip


def test_texts_in_csv_may_be_missing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("words,stars\ngood,many\n,few\n")
    source = load_source(
        str(tmp_path / "t.csv"), options={"label_column": "stars", "text_column": "words", "tokenizer": str(folder)}
    )
    assert source.features.raw.shape == (2, 64)
    assert source.features.raw[1, :3].tolist() == [CLS, SEP, PAD]
    assert not source.standardize


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"tokenizer": None}, ConfigError, "the texts of column words need a tokenizer: set dataset.tokenizer"),
        ({"text_column": "word"}, ConfigError, "text_column: .* has no column 'word'; did you mean words"),
        ({"text_column": "price"}, DataError, "column price of .* should hold texts; it holds int64"),
        ({"text_column": "stars"}, ConfigError, "one role only"),
        ({"length": 2}, ConfigError, "length must be at least 3; got 2"),
    ],
)
def test_wrong_settings_of_texts_are_refused(
    folder: Path, tmp_path: Path, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    table = write_table(tmp_path / "t.parquet")
    with pytest.raises(error, match=words):
        load_source(str(table), options={**ROLES, "tokenizer": str(folder), **change})


def test_a_model_for_texts_predicts_new_texts(folder: Path, tmp_path: Path) -> None:
    table = write_table(tmp_path / "t.parquet", 60)
    kinfed.run(
        dataset={"name": str(table), **ROLES, "tokenizer": str(folder)},
        model={"name": "transformer", "vocabulary": 12, "width": 8, "heads": 2, "hidden": 8, "dropout": 0.0},
        algorithms=["fedavg"], rounds=1, participation=1, seeds=[0], steps=1, out=tmp_path / "run",
    )  # fmt: skip
    exported = export_model(tmp_path / "run", "x", out=tmp_path / "x.safetensors").path
    (tmp_path / "new.csv").write_text("id,words\n1,a good good book\n2,bad !\n")
    model = ModelPipeline.read(exported)
    tokens = torch.tensor([[CLS, A, GOOD, GOOD, BOOK, SEP], [CLS, BAD, MARK, SEP, PAD, PAD]])
    assert torch.equal(predict(model, tmp_path / "new.csv").probabilities, model.module(tokens).softmax(1).detach())
    (tmp_path / "other.csv").write_text("id,text\n1,good\n")
    with pytest.raises(ConfigError, match="has no column 'words'"):
        predict(ModelPipeline.read(exported), tmp_path / "other.csv")


# --- reviews by domain


def write_reviews(place: Path, rows: list[tuple[str, str, str, int]]) -> None:
    place.mkdir(parents=True)
    names = ("client", "official_split", "text", "label")
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    pq.write_table(pa.table(columns), place / "train-00000-of-00001.parquet")


def test_reviews_are_shared_out_by_domain_without_copies(folder: Path, tmp_path: Path) -> None:
    write_reviews(
        tmp_path / "data" / "fdu_mtl_reviews",
        [
            ("books", "train", "good book", 1),  # also in the test split
            ("books", "train", "bad book", 0),
            ("toys", "train", "bad book", 0),  # a copy in another domain
            ("books", "test", "good book", 1),
            ("toys", "train", "good", 1),
            ("toys", "test", "bad", 0),
        ],
    )
    source = load_source("reviews", options={"tokenizer": str(folder), "length": 4})
    assert source.features.raw[:, 1:3].tolist() == [[BAD, BOOK], [GOOD, BOOK], [GOOD, SEP], [BAD, SEP]]
    assert source.labels.tolist() == [0, 1, 1, 0]
    assert source.is_test is not None
    assert source.is_test.tolist() == [False, True, False, True]
    assert source.notes == ["2 of 6 reviews are copies of others and are left out"]
    federation = make_federation(source, "column", None)
    assert federation.names == ["books", "toys"]
    assert [rows.tolist() for rows in federation.test.lists()] == [[1], [3]]
    half = load_source("reviews", options={"tokenizer": str(folder), "length": 4, "examples": 2})
    assert half.owners is not None
    assert half.is_test is not None
    assert half.is_test.tolist() == [False, True]
    assert half.notes[1] == "2 of the 4 reviews of reviews, drawn at random"
    rows = [source.features.raw.tolist().index(tokens) for tokens in half.features.raw.tolist()]
    assert half.labels.tolist() == source.labels[rows].tolist()
    assert source.owners is not None
    assert half.owners.tolist() == source.owners[rows].tolist()


def test_reviews_without_a_tokenizer_or_files_say_what_to_do(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"need a tokenizer: set dataset.tokenizer"):
        load_source("reviews")
    with pytest.raises(DataError, match=r"put train-\*.parquet into .*fdu_mtl_reviews; columns client"):
        load_source("reviews", options={"tokenizer": str(folder)})
