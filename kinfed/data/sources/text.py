"""Data sets of texts by author: tweets as numbers of words, for every word its GloVe vector, and reviews as tokens.

A tweet is its first `words` tokens, lower case, cut as in GloVe's own corpus (don't is do and n't; punctuation marks
are words). Number 0 is padding, the zero vector; it stands before a short text, so that a recurrent network has read
the last word last. Number 1 is a word without a vector: the mean of all vectors (names after @ and web addresses are
such words). Only numbers are stored, int32; vectors are looked up when a batch is made, they are not trained, and they
are no part of a model or a message.

FedProx's preparation of Sentiment140 differs in what carries no information: it pads behind a text, and with the
unknown word.
"""

import html
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from kinfed.core import option, storage
from kinfed.data.examples.arrays import encode
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.sources import hub
from kinfed.data.sources.hub import ParquetSet
from kinfed.data.sources.source import Source, subsample
from kinfed.data.sources.table_options import LENGTH
from kinfed.data.sources.wordpiece import TEXT_COLUMN, TextInput, WordPiece
from kinfed.errors import DataError

PADDING, UNKNOWN = 0, 1
SENTIMENTS = Problem.of_classes(2, ["negative", "positive"])
_TOKEN = re.compile(
    r"https?://\S+|www\.\S+|@\w+"  # addresses and names: one word each
    r"|[^\W\d_]+?(?=n't\b)|n't\b|'(?:s|m|re|ve|ll|d)\b"
    r"|\w+|[^\w\s]"
)
_GLOVE = "https://nlp.stanford.edu/projects/glove"
_VECTORS = "GloVe text file, or a folder of Parquet files (word, vector); a path, or in the data folder"


@dataclass(frozen=True)
class TweetOptions:
    min_tweets: int = option(30, "leave out users with fewer tweets; FedProx takes those with at least 30", ge=1)
    words: int = option(25, "words of a tweet that are read", ge=1)
    vectors: str = option("glove.6B.300d.txt", _VECTORS)


@dataclass(frozen=True)
class TweetSubsetOptions(TweetOptions):
    min_tweets: int = option(5, "leave out users with fewer tweets; no user here has FedProx's 30", ge=1)
    vectors: str = option("glove_6b_50d_subset", _VECTORS)


def tokens(text: str) -> list[str]:
    return _TOKEN.findall(html.unescape(text).lower())


def numbers(words: list[str], known: Mapping[str, int], length: int) -> list[int]:
    """The first `length` words as numbers, padded in front."""
    known_words = [known.get(word, UNKNOWN) for word in words[:length]]
    return [PADDING] * (length - len(known_words)) + known_words


@dataclass(frozen=True)
class TweetSet:
    """Sentiment140 in the columns of the hub: text, user, sentiment (0 negative, 4 positive)."""

    name: str
    files: ParquetSet
    notes: tuple[str, ...] = ()

    def load(self, options: TweetOptions, data_dir: Path | None, seed: int) -> Source:
        files = hub.obtain(self.files, data_dir)["train"]
        vector_files = _vector_files(options.vectors, data_dir)
        tweets = self._of_active_users(files, options.min_tweets)
        settings = storage.record_digest(asdict(options))[:8]
        make = lambda: self._encode(tweets["text"].to_pylist(), options.words, vector_files)  # noqa: E731
        encoded = hub.cached(f"{self.name}-{settings}", [*files, *vector_files], make)
        owners, names = encode(np.array(tweets["user"].to_pylist()), "column user")
        unknown, words = int((encoded["raw"] == UNKNOWN).sum()), int((encoded["raw"] != PADDING).sum())
        notes = [f"{unknown / max(words, 1):.0%} of the words have no GloVe vector and share one", *self.notes]
        labels = torch.tensor([sentiment // 4 for sentiment in tweets["sentiment"].to_pylist()])
        features = Features(encoded["raw"], vectors=encoded["vectors"])
        return Source(self.name, features, labels, SENTIMENTS, owners=owners, owner_names=names, notes=notes)

    def _of_active_users(self, files: list[Path], least: int) -> pa.Table:
        table = hub.read_complete(self.name, files, ["text", "user", "sentiment"])
        if unknown := sorted(set(pc.unique(table["sentiment"]).to_pylist()) - {0, 4}):
            raise DataError(f"{self.name}: sentiment is 0 (negative) or 4 (positive); found {unknown[:5]}")
        tally = pc.value_counts(table["user"])
        users, counts = tally.field("values"), tally.field("counts")
        active = users.filter(pc.greater_equal(counts, least))
        if not len(active):
            raise DataError(
                f"no user of {self.name} has {least} tweets, the most active one has {pc.max(counts)}; "
                "lower it with --set dataset.min_tweets=..."
            )
        return table.filter(pc.is_in(table["user"], active))

    def _encode(self, texts: list[str], length: int, vector_files: list[Path]) -> dict[str, Tensor]:
        """The tweets in numbers, and the vectors of the words that occur."""
        cut = [tokens(text)[:length] for text in texts]
        vectors = read_vectors(vector_files, {word for words in cut for word in words})
        if not vectors:
            where = f"{self.name} has a vector in {vector_files[0]}"
            raise DataError(f"none of the words of {where}; is that a GloVe file?")
        known = {word: number for number, word in enumerate(sorted(vectors), start=UNKNOWN + 1)}
        matrix = np.stack([vectors[word] for word in known])
        table = np.concatenate([np.zeros_like(matrix[:1]), matrix.mean(0, keepdims=True, dtype=np.float64), matrix])
        raw = torch.tensor([numbers(words, known, length) for words in cut], dtype=torch.int32)
        return {"raw": raw, "vectors": torch.from_numpy(table.astype(np.float32))}


def read_vectors(files: Iterable[Path], wanted: set[str]) -> dict[str, np.ndarray]:
    """The vectors of these words, from a GloVe text file (a word and its numbers per line) or Parquet files."""
    vectors: dict[str, np.ndarray] = {}
    for file in files:
        vectors |= _from_parquet(file, wanted) if file.suffix == ".parquet" else _from_text(file, wanted)
    sizes = sorted({len(vector) for vector in vectors.values()})
    if len(sizes) > 1:
        raise DataError(f"{file.parent}: vectors have different lengths, {sizes[0]} and {sizes[-1]}")
    return vectors


def _from_text(file: Path, wanted: set[str]) -> dict[str, np.ndarray]:
    vectors = {}
    with file.open(encoding="utf-8") as lines:
        for place, line in enumerate(lines, start=1):
            word, _, rest = line.rstrip().partition(" ")
            if word in wanted:
                try:
                    vectors[word] = np.array(rest.split(" "), dtype=np.float32)
                except ValueError as error:
                    raise DataError(f"{file}, line {place}: a word and its numbers were expected ({error})") from error
    return vectors


def _from_parquet(file: Path, wanted: set[str]) -> dict[str, np.ndarray]:
    table = hub.read_parquet(file, ["word", "vector"])
    table = table.filter(pc.is_in(table["word"], pa.array(sorted(wanted), pa.string())))
    vectors = [np.array(vector, dtype=np.float32) for vector in table["vector"].to_pylist()]
    return dict(zip(table["word"].to_pylist(), vectors, strict=True))


def _vector_files(name: str, data_dir: Path | None) -> list[Path]:
    places = [Path(name).expanduser(), hub.data_folder(data_dir) / name]
    for place in places:
        if place.is_file():
            return [place]
        if files := sorted(place.rglob("*.parquet")):
            return files
    raise DataError(
        f"there are no word vectors at {places[0]} or {places[1]}; unpack glove.6B.zip from {_GLOVE} there, "
        "or name another GloVe file with --set dataset.vectors=PATH"
    )


_BIASED = (
    "sentiment140_subset is small and biased (few users with many tweets; the label follows the date): "
    "good for trying the code, never for a figure"
)
load_sentiment140 = TweetSet("sentiment140", ParquetSet("sentiment140", ("train",), "stanfordnlp/sentiment140")).load
load_sentiment140_subset = TweetSet(
    "sentiment140_subset", ParquetSet("sentiment140_subset", ("train",)), (_BIASED,)
).load

_ADVICE = "columns client, official_split (train or test), text and label (0 or 1), one row per review"
_REVIEWS = ParquetSet("fdu_mtl_reviews", ("train",), advice=_ADVICE)


_TOKENIZER = "folder with tokenizer.json or vocab.txt, such as that of the model's weights (required)"


@dataclass(frozen=True)
class ReviewOptions:
    tokenizer: str = option("", _TOKENIZER)
    length: int = option(LENGTH, "tokens of a review that are read", ge=3)
    examples: int | None = option(None, "only this many reviews, drawn at random; none: all")


def load_reviews(options: ReviewOptions, data_dir: Path | None, seed: int) -> Source:
    """Product and film reviews of sixteen domains, which are the clients: P. Liu, X. Qiu and X. Huang, Adversarial
    Multi-task Learning for Text Classification (FDU-MTL), ACL 2017. Fourteen kinds of products from Amazon, films from
    IMDB and from Rotten Tomatoes (MR).

    Of texts that occur more than once one copy is kept, in the official test split if one stands there: 539 of its
    6,400 rows also stand among the training rows of their domain, and a model would be tested on what it has seen."""
    text = TextInput.of_options(asdict(options))
    assert text is not None
    files = hub.obtain(_REVIEWS, data_dir)["train"]
    table = hub.read_complete("reviews", files, ["client", "official_split", TEXT_COLUMN, "label"])
    splits = np.array(table["official_split"].to_pylist())
    texts = table[TEXT_COLUMN].to_pylist()
    keep = first_copies(texts, splits == "test")
    distinct = [texts[row] for row in keep]
    tokenizer_files = WordPiece.load(text.tokenizer).files
    sources = [*files, *tokenizer_files]
    tokens = hub.cached(f"reviews-{text.length}", sources, lambda: {"tokens": text.encode(distinct)})["tokens"]
    owners, names = encode(np.array(table["client"].to_pylist())[keep], "column client")
    labels = torch.from_numpy(table["label"].to_numpy().astype(np.int64)[keep])
    is_test = torch.from_numpy((splits == "test")[keep])
    notes = [f"{len(texts) - len(keep)} of {len(texts)} reviews are copies of others and are left out"]
    source = Source(
        "reviews", Features(tokens), labels, SENTIMENTS, is_test, owners=owners, owner_names=names, notes=notes
    )
    return subsample(source, options.examples, "reviews")


def first_copies(texts: list[str], first: np.ndarray) -> list[int]:
    """Rows with one copy of every text, in order: the first of those that `first` [N] marks, else the first of all."""
    chosen: dict[str, int] = {}
    for row in (*np.flatnonzero(first).tolist(), *np.flatnonzero(~first).tolist()):
        chosen.setdefault(texts[row], row)
    return sorted(chosen.values())
