"""Long texts as scores: what ridge regression on their words says of the target, learnt from sums over sites.

    x_b = tf_b idf_b / |·|,      idf_b = log((1 + N) / (1 + df_b)) + 1                                           (1)
    w = argmin Σ_i |y_i − ȳ − x_i'w|² + λ |w|²,      one column of w for every column of y                       (2)

with b one of BUCKETS places of hashed words (BLAKE2b, the same on every machine), tf their counts, and df the number of
training texts with b: scikit-learn's TfidfTransformer and Ridge. Rows are sparse and stay so. All of it is sums over
rows, so over sites: df is one, and conjugate gradients need nothing but X'(X v), so that sites learn w in as many
rounds as there are steps, all folds together.

The score of a training text is that of a model which did not see it (FOLDS parts of every site's rows); all other texts
have that of all training rows. What learns from scores so finds them as good as they will be on new rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kinfed.data.examples.problem import Problem
from kinfed.data.preprocessing.cells import Cells
from kinfed.data.preprocessing.encodings import TextEncoding
from kinfed.data.preprocessing.hashed_words import BUCKETS, packed, weighted, word_counts

Array = np.ndarray[Any, Any]

PENALTY = 1.0  # λ
FOLDS = 5
STEPS, CLOSE = 50, 1e-4  # of conjugate gradients: most of them, and the share of the first residual that ends them
MOST_SCORES = 20  # columns of y


@dataclass(frozen=True)
class TextTarget:
    """What scores are learnt of: numbers [N, S] of every row, and what each column is called."""

    y: Array
    names: tuple[str, ...]

    @classmethod
    def of(cls, labels: Array, problem: Problem) -> TextTarget | None:
        """Whether a row is of each class (of two: of the second), or the number; counts as their logarithm. None for
        other kinds of problem, and for more than MOST_SCORES classes."""
        if problem.kind in ("regression", "counts") and labels.ndim == 1:
            y = labels.astype(np.float64)
            return cls((np.log1p(y) if problem.kind == "counts" else y)[:, None], ("",))
        if not problem.has_classes or labels.ndim > 1 or problem.num_classes > MOST_SCORES:
            return None
        first = 1 if problem.num_classes == 2 else 0
        names = ("",) if first else tuple(f" {name}" for name in problem.class_labels)
        return cls((labels[:, None] == np.arange(first, problem.num_classes)).astype(np.float64), names)


@dataclass
class TextScores:
    """Learns scores of text columns from the training `rows` [m] of `sites` sites, `site` [m]."""

    cells: Mapping[str, Cells]
    rows: Array
    site: Array
    sites: int
    target: TextTarget | None
    fitted: dict[str, Array] = field(default_factory=dict)  # [m, S] of training rows, by models that did not see them
    nbytes: int = 0  # of the messages that this takes

    def learn(self, name: str, reason: str, empty_sites: int) -> TextEncoding | None:
        """The encoding of a column; None without a target, or if it holds no texts."""
        cells = self.cells[name]
        if self.target is None or cells.codes is None:
            return None
        y, codes = self.target.y[self.rows], cells.codes[self.rows]
        counts, texts = word_counts(cells.values)[codes], int((codes >= 0).sum())
        documents = np.asarray((counts > 0).sum(0)).reshape(-1)
        x, part = weighted(counts, documents, texts), self._places() % FOLDS
        w, level, steps = ridge(x, y)
        fitted = np.tile(level, (len(y), 1))
        for fold in range(FOLDS):
            left_out = part == fold
            if left_out.any() and not left_out.all():
                w_fold, level_fold, more = ridge(x[~left_out], y[~left_out])
                fitted[left_out] = x[left_out] @ w_fold + level_fold
                steps = max(steps, more)
        self.fitted[name] = fitted.astype(np.float32)
        self.nbytes += self.sites * 4 * BUCKETS * (1 + steps * (1 + FOLDS) * y.shape[1])
        used = np.flatnonzero(documents)
        numbers = (packed(used, "<u4"), packed(documents[used], "<u4"), packed(w[used], "<f4"))
        return TextEncoding(
            name, reason, tuple(f"{name} score{column}" for column in self.target.names),
            tuple((float(column.mean()), float(column.std()) or 1.0) for column in fitted.T), tuple(level.tolist()),
            texts, *numbers, empty_sites,
        )  # fmt: skip

    def _places(self) -> Array:
        """[m] the place of every row among those of its site."""
        order = np.argsort(self.site, kind="stable")
        first = np.concatenate([[0], np.cumsum(np.bincount(self.site, minlength=self.sites))])
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order)) - first[self.site[order]]
        return place


def ridge(x: Any, y: Array) -> tuple[Array, Array, int]:
    """w [B, S] and ȳ [S] of (2), and the steps that conjugate gradients took."""
    level = y.mean(0)
    residual = np.asarray(x.T @ (y - level))
    w, direction = np.zeros_like(residual), residual.copy()
    square = first = (residual**2).sum(0)
    for step in range(STEPS):
        if (square <= CLOSE**2 * first).all():
            return w, level, step
        image = np.asarray(x.T @ (x @ direction)) + PENALTY * direction  # the sum over sites
        rate = square / np.maximum((direction * image).sum(0), 1e-300)
        w += rate * direction
        residual -= rate * image
        before, square = square, (residual**2).sum(0)
        direction = residual + square / np.maximum(before, 1e-300) * direction
    return w, level, STEPS
