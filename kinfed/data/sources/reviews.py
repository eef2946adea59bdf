"""Product and film reviews of sixteen domains, two sentiments: FDU-MTL.

P. Liu, X. Qiu and X. Huang, Adversarial Multi-task Learning for Text Classification, ACL 2017: fourteen kinds of
products from Amazon, films from IMDB and from Rotten Tomatoes (MR). A domain is a client.

Of texts that occur more than once one copy is kept, in the official test split if one stands there: 539 of its 6,400
rows also stand among the training rows of their domain, and a model would be tested on what it has seen.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from kinfed.core import option
from kinfed.data.examples.arrays import encode
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.sources import hub
from kinfed.data.sources.hub import ParquetSet
from kinfed.data.sources.source import Source, subsample
from kinfed.data.sources.table_options import LENGTH
from kinfed.data.sources.wordpiece import TEXT_COLUMN, TextInput, WordPiece

_FILES = ParquetSet(
    "fdu_mtl_reviews",
    ("train",),
    advice="columns client, official_split (train or test), text and label (0 or 1), one row per review",
)
_COLUMNS = ["client", "official_split", TEXT_COLUMN, "label"]


@dataclass(frozen=True)
class ReviewOptions:
    tokenizer: str = option(
        "", "folder with tokenizer.json or vocab.txt, such as that of the model's weights (required)"
    )
    length: int = option(LENGTH, "tokens of a review that are read", ge=3)
    examples: int | None = option(None, "only so many reviews, drawn at random; none: all")


def load_reviews(options: ReviewOptions, data_dir: Path | None, seed: int) -> Source:
    text = TextInput.of_options(asdict(options))
    assert text is not None
    files = hub.obtain(_FILES, data_dir)["train"]
    table = hub.read_complete("reviews", files, _COLUMNS)
    splits = np.array(table["official_split"].to_pylist())
    texts = table[TEXT_COLUMN].to_pylist()
    keep = first_copies(texts, splits == "test")
    distinct = [texts[row] for row in keep]
    tokenizer_files = WordPiece.load(text.tokenizer).files
    tokens = hub.cached(
        f"reviews-{text.length}", [*files, *tokenizer_files], lambda: {"tokens": text.encode(distinct)}
    )["tokens"]
    owners, names = encode(np.array(table["client"].to_pylist())[keep], "column client")
    source = Source(
        "reviews",
        Features(tokens),
        torch.from_numpy(table["label"].to_numpy().astype(np.int64)[keep]),
        Problem.of_classes(2, ["negative", "positive"]),
        is_test=torch.from_numpy((splits == "test")[keep]),
        owners=owners,
        owner_names=names,
        notes=[f"{len(texts) - len(keep)} of {len(texts)} reviews are copies of others and are left out"],
    )
    return subsample(source, options.examples, "reviews")


def first_copies(texts: list[str], first: np.ndarray) -> list[int]:
    """Rows with one copy of every text, in order: the first of those that `first` [N] marks, else the first of all."""
    chosen: dict[str, int] = {}
    for row in (*np.flatnonzero(first).tolist(), *np.flatnonzero(~first).tolist()):
        chosen.setdefault(texts[row], row)
    return sorted(chosen.values())
