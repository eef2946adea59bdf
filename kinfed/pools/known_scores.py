"""Scores of the models that were last evaluated: a model that has not changed since is not computed again.

A model is known by a digest of all its numbers, so that a score is used again for the same bits only. A pool that was
made anew, as by a resumed run, knows none and computes them all, to the same bits: scores are kept only where that of
a client does not depend on the clients beside it (`Task.scores_alone`).
"""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kinfed.data import Split
from kinfed.engine import Score, Task

FEW_EXAMPLES = 16  # of a client, on average: fewer are scored in the time that the digest of a model takes
MOST_CLIENTS = 100_000  # whose scores are kept: a few hundred bytes each
_DIGEST_BYTES = 16


class KnownScores:
    """Scores of the first MOST_CLIENTS clients of a federation, by split and name of the model."""

    def __init__(self, num_clients: int) -> None:
        self._num_clients = min(num_clients, MOST_CLIENTS)
        self._tables: dict[tuple[str, str], _Table] = {}
        self._lock = threading.Lock()

    def score(self, task: Task, name: str, split: str, theta: Tensor, part: Split) -> Score:
        """task.evaluate(theta, part) of the models called `name` on the split of that name."""
        if not self._may_keep(task, theta, part):
            return task.evaluate(theta, part)
        digests = model_digests(theta)
        with self._lock:
            table = self._tables.setdefault((split, name), _Table(self._num_clients))
        known = table.knows(part.ids, digests)
        old, new = known.nonzero().squeeze(1), (~known).nonzero().squeeze(1)
        if not len(old):
            score = task.evaluate(theta, part)
            table.put(part.ids, digests, score)
            return score
        old_score = table.take(part.ids[old], lambda: task.evaluate(theta[old], part.take(old)))
        if not len(new):
            return old_score
        score = task.evaluate(theta[new], part.take(new))
        table.put(part.ids[new], digests[new.numpy()], score)
        return Score.joined([old_score, score], torch.argsort(torch.cat([old, new])))

    def _may_keep(self, task: Task, theta: Tensor, part: Split) -> bool:
        return (
            task.scores_alone(theta, part)
            and theta.device.type == "cpu"
            and int(part.ids.max()) < self._num_clients
            and int(part.count.sum()) >= FEW_EXAMPLES * len(part.count)
        )


class _Table:
    """[K, ...] what is known of every client. Threads may read and write it at the same time, of different clients."""

    def __init__(self, num_clients: int) -> None:
        self._digests = np.zeros((num_clients, _DIGEST_BYTES), np.uint8)
        self._rows: Score | None = None
        self._has_error = False
        self._lock = threading.Lock()

    def knows(self, ids: Tensor, digests: np.ndarray) -> Tensor:
        return torch.from_numpy((self._digests[ids.numpy()] == digests).all(1))

    def take(self, ids: Tensor, again: Callable[[], Score]) -> Score:
        """Scores of these clients, all known. Draws for standard errors are made of outputs, which are not kept:
        on request they are computed again."""
        assert self._rows is not None  # some were put
        rows = self._rows.take(ids)

        def draws() -> Tensor:
            score = again()
            known = score.error if score.draws is None else score.draws
            assert known is not None
            return known

        return replace(rows, error_or_draws=draws if self._has_error else None)

    def put(self, ids: Tensor, digests: np.ndarray, score: Score) -> None:
        with self._lock:
            if self._rows is None:
                rows = score.take(torch.zeros(len(self._digests), dtype=torch.int64))  # as many, of any values
                self._rows, self._has_error = replace(rows, error_or_draws=None), score.error_or_draws is not None
        for column, values in zip(_columns(self._rows), _columns(score), strict=True):
            column[ids] = values
        self._digests[ids.numpy()] = digests


def _columns(score: Score) -> list[Tensor]:
    return [score.correct, score.loss, score.count, *(score.sums[name] for name in sorted(score.sums))]


def model_digests(theta: Tensor) -> np.ndarray:
    """uint8 [n, 16] of rows [n, P]; rows that differ in any bit have others."""
    rows = theta.detach().contiguous().numpy()
    texts = b"".join(hashlib.sha256(row).digest()[:_DIGEST_BYTES] for row in rows)
    return np.frombuffer(texts, np.uint8).reshape(len(rows), _DIGEST_BYTES)
