"""Texts as sparse counts of hashed words, weighted by how rare they are."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any

import numpy as np
from scipy import sparse

from kinfed.data.preprocessing.cells import words
from kinfed.errors import DataError

Array = np.ndarray[Any, Any]
BUCKETS = 1 << 16


def word_counts(texts: list[str]) -> Any:
    """Sparse [len(texts) + 1, BUCKETS] counts of words, hashed by BLAKE2b, which is the same on every machine; the last
    row is of a missing text."""
    places: dict[str, int] = {}
    columns, first = [], [0]
    for text in texts:
        for word in words(text):
            if word not in places:
                digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
                places[word] = int.from_bytes(digest, "little") % BUCKETS
            columns.append(places[word])
        first.append(len(columns))
    shape = (len(texts) + 1, BUCKETS)
    counts = sparse.csr_matrix((np.ones(len(columns)), columns, [*first, len(columns)]), shape)
    counts.sum_duplicates()
    return counts


def weighted(counts: Any, documents: Array, texts: int) -> Any:
    """Rows of counts times log((1 + N) / (1 + df)) + 1, for N `texts` of which `documents` [BUCKETS] have a word, each
    of length 1."""
    x = counts.multiply(np.log((1 + texts) / (1 + documents)) + 1).tocsr()
    length = np.sqrt(np.asarray(x.multiply(x).sum(1)).reshape(-1))
    return sparse.diags(1 / np.where(length > 0, length, 1.0)) @ x


def packed(numbers: Array, form: str) -> str:
    return base64.b64encode(np.ascontiguousarray(numbers, form).tobytes()).decode()


def unpacked(text: str, form: str) -> Array:
    """What `packed` took, as one row; DataError for any other text."""
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), form)
    except (binascii.Error, ValueError):
        raise DataError("the words of a text column cannot be read; export or save the model again") from None
